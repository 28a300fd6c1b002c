"""What stops a run from outside, memory or a server, in one line that says how to go on."""

from pathlib import Path

import torch

from stppo.settings import RunConfig


class RunStopped(OSError):
    """The run cannot go on now; what it has done is kept, and the message says what to do."""


def what_stopped(error: Exception, settings: RunConfig, run_dir: Path, iteration: int) -> RunStopped | None:
    """The one-line form of an error that is not the run's own; None for any other.

    iteration: iterations done. The knobs are named in the order in which they cost least; a run goes on from its
    checkpoint under those that change no result.
    """
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, ConnectionError | TimeoutError):
        return RunStopped(
            f"stopped after iteration {iteration}, which is kept: {reason}; run the same command again to go on"
        )
    if not _is_out_of_memory(error):
        return None
    training, rollout = settings.training, settings.rollout
    knobs = [
        f"lower training.micro_batch_tokens (now {_yaml(training.micro_batch_tokens)})",
        *([] if training.gradient_checkpointing else ["training.gradient_checkpointing=true"]),
    ]
    if rollout.engine == "vllm":
        knobs.append(f"lower rollout.gpu_memory_utilization (now {rollout.gpu_memory_utilization})")
    again = []
    if settings.policy.lora is None:
        again.append("'policy.lora={rank: 16}'")
    if training.optimizer == "adam":
        again.append("training.optimizer=adam8bit")
    anew = f"; or, as another run, set {' or '.join(again)}" if again else ""
    return RunStopped(
        f"out of memory ({reason[:200]}); in this order: {', '.join(knobs)}, and go on from "
        f"the newest checkpoint with --out {run_dir}{anew}"
    )


def _is_out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    signs = ("out of memory", "cublas_status_alloc_failed", "can't allocate memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in signs)
    )


def _yaml(value: int | None) -> str:
    return "null" if value is None else str(value)
