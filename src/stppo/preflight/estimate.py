"""What memory and disk a run takes: weights, gradients, optimiser states, activations, KV cache.

Weights, and what is trained of them, are counted on the models themselves, made without storage; all else
follows from the settings by the table below. Of the recorded peaks of runs on CPUs the estimate is 82 to
112 %; of what one update adds, measured alone, 130 to 140 %; with a GPU it was never compared.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from stppo.config.files import ConfigError
from stppo.config.loading import LoadedRun
from stppo.config.settings import RunConfig
from stppo.policy.critic import Critic
from stppo.policy.frozen import freeze_below
from stppo.policy.known_models import KNOWN
from stppo.policy.policy import LOGITS_AT_ONCE, UNREADABLE, build_policy, check_positions, load_shape, why

GIB = 2**30

# Assumptions, sizes in bytes; every trajectory is as long as the settings allow.
OPTIMIZER = {"adam": 8, "adam8bit": 2 + 8 / 256, "sgd": 0}  # for one parameter
LAYER = {  # what autograd keeps of a layer for one token: times hidden size, key width, intermediate size
    "float32": (32, 8, 16),
    "bfloat16": (30, 4, 8),
}
PASSING = 1.5  # layers of which all is there at once, on the way back
LOGIT, DRAWN = 22, 28  # for one logit: while log-probs are computed, while a token is drawn
LOST = {"GPU": 0.10, "host": 0.20}  # of all that: between blocks, and what is not counted here
CUDA = 1.0 * GIB  # driver, kernels, libraries' workspaces
ASLEEP, ENGINE_STEP = 1.5 * GIB, 2.0 * GIB  # of vLLM: what it keeps while it sleeps, what a step takes
PROCESS, LARGE_PROCESS = 1.0 * GIB, 5.0 * GIB  # Python and PyTorch; with CUDA or vLLM
QUESTIONS = 2.0 * GIB  # of all benchmarks of the hub, in memory


@dataclass(frozen=True)
class Models:
    """Of policy, critic and reference: bytes of their weights, and how many numbers an update changes.

    copies: bytes of what autocast makes of float32 weights. cached: numbers in the KV cache for one token.
    """

    config: PreTrainedConfig
    parameters: int
    weights: dict[str, float]
    trained: dict[str, int]
    copies: float
    cached: int


def models_of(loaded: LoadedRun, local: bool = True) -> Models:
    """The models of a run. local: do not ask the hub for their sizes.

    Raises ConfigError where the policy lacks layers that are to be trained, or positions for a trajectory,
    FileNotFoundError where its config is not found.
    """
    run = loaded.settings
    lora, top, half = run.policy.lora, run.policy.trainable_layers, run.training.precision == "bfloat16"
    with torch.device("meta"):
        if run.policy.pretrained is None:
            policy = build_policy(run.policy, loaded.world.tokenizer)
        else:
            policy = _pretrained(run.policy.pretrained, local)
        config, size = policy.config, policy.num_parameters()
        check_positions(config.max_position_embeddings, run.rollout.max_tokens)
        try:
            critic = loaded.objective.credit.needs_critic and run.training.values == "critic"
            made = _made(policy, run, critic)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    weights = {name: sum(p.nbytes for p in model.parameters()) for name, model in made.items()}
    trained = {name: sum(p.numel() for p in m.parameters() if p.requires_grad) for name, m in made.items()}
    if run.scores_reference and not lora:
        weights["reference"] = (2 if half else 4) * size if top is None else 4 * trained["policy"]
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    cached = 2 * config.num_hidden_layers * width * (getattr(config, "num_key_value_heads", None) or heads)
    return Models(config, size, weights, trained, 2.0 * size if half and not lora else 0.0, cached)


def _pretrained(name: str, local: bool) -> PreTrainedModel:
    try:
        config = load_shape(name) if name in KNOWN else load_shape(name, local_files_only=local)
    except UNREADABLE as error:
        if name in KNOWN:
            raise
        raise FileNotFoundError(f"the sizes of {name} are not known here {why(name, error)}") from error
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _made(policy: PreTrainedModel, run: RunConfig, critic: bool) -> dict[str, torch.nn.Module]:
    lora = run.policy.lora
    if lora and run.training.precision == "bfloat16":
        policy.to(torch.bfloat16)
    if run.policy.trainable_layers is not None:
        freeze_below(policy, run.policy.trainable_layers)
    if lora and find_spec("peft") is None:  # which a check says; adapters are small
        policy.requires_grad_(False)
        lora = None
    made: dict[str, torch.nn.Module] = {"critic": Critic(policy, lora)} if critic else {}
    if lora:
        from stppo.policy.lora import with_lora

        policy = with_lora(policy, lora)
    return {"policy": policy} | made


@dataclass(frozen=True)
class Estimate:
    """Bytes by name: of a GPU's memory in each phase, or of the host's where there is none; of the host's
    beside a GPU; of the disk. cached: trajectories that vLLM's cache on a GPU holds."""

    phases: dict[str, dict[str, float]]
    host: dict[str, float]
    disk: dict[str, float]
    cached: int | None


def estimate(run: RunConfig, models: Models, gpu: float | None) -> Estimate:
    """gpu: its bytes, or None."""
    training, rollout, start, size = run.training, run.rollout, run.warm_start, models.parameters
    asked, layers = training.trajectories_per_iteration, models.config.num_hidden_layers
    kept, checkpoint, vllm = dict(models.weights), 0.0, rollout.engine == "vllm"
    for name, numbers in models.trained.items():
        kind = "adam" if name == "critic" and training.optimizer == "sgd" else training.optimizer
        kept[f"{name}: {kind}"] = OPTIMIZER[kind] * numbers
        checkpoint += (4 + OPTIMIZER[kind]) * numbers
    top = run.policy.trainable_layers or layers
    if top < layers:
        tokens = asked * rollout.max_tokens * (training.staleness_iterations + 2)  # queue, and in training
        kept["states of frozen layers"] = 4 * models.config.hidden_size * tokens

    rows = asked // training.minibatches
    several = pass_tokens(run, rows) < rows * rollout.max_tokens
    norms = 2 if training.kl_coefficient or training.entropy_coefficient else 1  # that are watched
    update = kept | _passes(run, models, rows, top)
    update["gradients"] = 4 * models.trained["policy"] * (2 + norms if several else 2)
    if vllm:
        update |= {"vLLM, asleep": ASLEEP} if gpu and rollout.sleep_level else _sampling(run, models, gpu, 0)
    played = max(asked, run.evaluation.questions, start.final_samples if start.max_steps else 0)
    phases = {"roll-out": kept | _sampling(run, models, gpu, played), "update": update}
    if start.max_steps:
        part = start.trained_weights == "policy" and (run.policy.lora is not None or top < layers)
        numbers = models.trained["policy"] if part else size
        begun = {"policy": 4.0 * size, "adam": OPTIMIZER["adam"] * numbers, "gradients": 4 * numbers}
        phases["warm start"] = begun | _passes(run, models, start.batch_size, top if part else layers)

    remote = "BenchmarkWorld" in run.world["_target_"] and not run.world.get("records")
    host = {"process": LARGE_PROCESS if vllm or gpu else PROCESS, "questions": QUESTIONS * remote}
    for name, parts in phases.items():
        lost = LOST["GPU" if gpu else "host"] * (sum(parts.values()) - parts.get("vLLM", 0))
        phases[name] = parts | {"lost": lost} | ({"CUDA": CUDA} if gpu else host)
    disk = {"two checkpoints": 2 * checkpoint, "warm start, trained policy": 8.0 * size}
    if not gpu:
        return Estimate(phases, {}, disk, None)
    host["checkpoint"] = max(checkpoint, 4.0 * size)  # it is read before it moves to the GPU
    if not vllm:
        return Estimate(phases, host, disk, None)
    weights, trajectory = _engine(run, models)
    host["vLLM's weights, asleep"] = weights if rollout.sleep_level == 1 else 0.0
    room = rollout.gpu_memory_utilization * gpu - weights - ENGINE_STEP
    return Estimate(phases, host, disk, max(0, int(room // trajectory)))


def pass_tokens(run: RunConfig, rows: int) -> int:
    """Tokens that go forward and back at once, of so many trajectories; one is never cut."""
    row, budget = run.rollout.max_tokens, run.training.micro_batch_tokens
    return row * (rows if budget is None else min(rows, max(budget // row, 1)))


def _passes(run: RunConfig, models: Models, rows: int, depth: int) -> dict[str, float]:
    """Forward and back through the upper `depth` layers."""
    config, tokens = models.config, pass_tokens(run, rows)
    inner = getattr(config, "intermediate_size", None) or config.n_inner or 4 * config.hidden_size
    widths = (config.hidden_size, models.cached // (2 * config.num_hidden_layers), inner)
    layer = sum(n * width for n, width in zip(LAYER[run.training.precision], widths, strict=True))
    if run.policy.attention == "eager":
        layer += 6 * config.num_attention_heads * run.rollout.max_tokens
    each = 4 * config.hidden_size if run.training.gradient_checkpointing else layer
    turns, most = run.world.get("turn_budget"), run.world.get("max_turn_tokens")
    agents = min(1, (turns + 1) * most / run.rollout.max_tokens) if turns and most else 1  # of all tokens
    return {
        "activations": tokens * (depth * each + PASSING * layer),
        "logits": LOGIT * min(tokens * agents * config.vocab_size, LOGITS_AT_ONCE),
        "bfloat16 copies of weights": models.copies,
    }


def _sampling(run: RunConfig, models: Models, gpu: float | None, asked: int) -> dict[str, float]:
    """vLLM takes its share; PyTorch what its slots need, where so many trajectories are asked for."""
    rollout = run.rollout
    if rollout.engine == "vllm":
        weights, trajectory = _engine(run, models)
        need = weights + rollout.max_num_seqs * trajectory
        return {"vLLM": rollout.gpu_memory_utilization * gpu if gpu else need}
    slots, size = min(rollout.batch_size, asked), 3 if run.training.precision == "bfloat16" else 4
    return {
        "KV cache": size * models.cached * slots * rollout.max_tokens,
        "logits": DRAWN * slots * models.config.vocab_size,
        "bfloat16 copies of weights": models.copies,
    }


def _engine(run: RunConfig, models: Models) -> tuple[float, float]:
    """Bytes of vLLM's own weights, whose output layer is not tied, and of one trajectory in its cache."""
    config, sizes = models.config, {"float32": 4, "bfloat16": 2, "float16": 2}
    size = sizes.get(run.rollout.dtype, sizes[run.training.precision])
    untied = config.vocab_size * config.hidden_size if config.tie_word_embeddings else 0
    return size * (models.parameters + untied), size * models.cached * run.rollout.max_tokens
