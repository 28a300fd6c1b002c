"""What stops a run from outside, memory or a server, in one line that says how to go on."""

from pathlib import Path

from stppo.config.settings import RunConfig
from stppo.policy.compute import is_out_of_memory, resolve_device
from stppo.rollout.rollout import EngineOutOfMemory


class RunStopped(OSError):
    """The run cannot go on now; what it has done is kept, and the message says what to do."""


def what_stopped(error: Exception, settings: RunConfig, run_dir: Path, iteration: int) -> RunStopped | None:
    """The one-line form of an error that is not the run's own; None for any other.

    iteration: iterations done. The knobs are named in the order in which they cost least, those of the
    roll-out first where memory ran out in its engine; a run goes on from its checkpoint under those that
    change no result."""
    if isinstance(error, ConnectionError | TimeoutError):
        return RunStopped(
            f"stopped after iteration {iteration}, which is kept: {_reason(error)}; run the same command "
            "again to go on"
        )
    if not is_out_of_memory(error):
        return None
    policy, again = settings.policy, _smaller_batch(settings)
    if policy.pretrained is not None and policy.trainable_layers is None:
        again.append("policy.trainable_layers=N (the top N alone)")
    if policy.lora is None:
        again.append("'policy.lora={rank: 16}'")
    if settings.training.optimizer == "adam" and resolve_device(settings.training.device).type == "cuda":
        again.append("training.optimizer=adam8bit")  # which a CPU does not have
    anew = f"; or, as another run, {' or '.join(again)}" if again else ""
    return RunStopped(
        f"{_out_of_memory(error, settings)}, and go on from the newest checkpoint with --out {run_dir}{anew}"
    )


def warm_start_stopped(error: Exception, settings: RunConfig) -> RunStopped | None:
    """The one-line form of an error for want of memory in a warm start; None for any other."""
    if not is_out_of_memory(error):
        return None
    policy, other = settings.policy, _smaller_batch(settings)
    if settings.warm_start.trained_weights == "all" and (policy.lora or policy.trainable_layers):
        other.append("warm_start.trained_weights=policy")
    knobs = ", ".join([_out_of_memory(error, settings), *other])
    return RunStopped(f"warm start: {knobs}, and run the same command again")


def _smaller_batch(settings: RunConfig) -> list[str]:
    """Fewer trajectories at once, in PyTorch; a checkpoint does not go on under it, for other samples are
    drawn."""
    rollout = settings.rollout
    return [f"lower rollout.batch_size (now {rollout.batch_size})"] if rollout.engine == "torch" else []


def _out_of_memory(error: Exception, settings: RunConfig) -> str:
    training, rollout = settings.training, settings.rollout
    trainer = [
        f"lower training.micro_batch_tokens (now {_yaml(training.micro_batch_tokens)})",
        *([] if training.gradient_checkpointing else ["training.gradient_checkpointing=true"]),
    ]
    if rollout.engine != "vllm":
        knobs = trainer
    else:
        share = f"lower rollout.gpu_memory_utilization (now {rollout.gpu_memory_utilization})"
        sleep = [] if rollout.sleep_level else ["rollout.sleep_level=2"]
        knobs = [*trainer, *sleep, share]
        if isinstance(error, EngineOutOfMemory):
            eager = [] if rollout.enforce_eager else ["rollout.enforce_eager=true"]
            knobs = [share, f"lower rollout.max_num_seqs (now {rollout.max_num_seqs})", *eager, *trainer]
    return f"out of memory ({_reason(error)[:200]}); in this order: {', '.join(knobs)}"


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _yaml(value: int | None) -> str:
    return "null" if value is None else str(value)
