"""Where the memory of a run goes, in bytes, before there is a run: GPU by phase, host, disk.

What is exact is counted: weights, gradients, optimizer states, buffers of their size. Activations are counted from what
autograd saves in one layer of a Qwen2 or Llama. The rest are the assumptions that stand first. Every trajectory
is taken to be as long as the config allows.
"""

from dataclasses import dataclass
from pathlib import Path

from stppo.config.settings import RunConfig
from stppo.preflight.shapes import Shape
from stppo.world.protocol import Protocol

GIB = 2**30

# Assumptions.
CUDA_CONTEXT = 1.0 * GIB  # driver, kernels, libraries' workspaces
FRAGMENTATION = 0.04  # of what PyTorch allocates on a GPU, lost between blocks
HOST_FRAGMENTATION = (
    0.10  # the same on the host, where glibc keeps more: so fits results/reference/smollm_comparison
)
ASLEEP = 1.5 * GIB  # what a sleeping vLLM keeps: CUDA graphs, workspaces
ENGINE_STEP = 2.0 * GIB  # vLLM's own activations and logits in one step
PROCESS = 5.0 * GIB  # host: Python, PyTorch, CUDA, vLLM, `datasets`
PLAIN_PROCESS = 1.0 * GIB  # host: Python and PyTorch alone
QUESTIONS = 2.0 * GIB  # host: the questions of all benchmarks with their paragraphs
READ_FILE = 8  # host: bytes of questions in memory for one byte of their file
HUB_DATA = 8.0 * GIB  # disk: the benchmarks' files and what `datasets` makes of them
QUEUE_TOKEN = 40  # host: bytes that queued batches hold for one token

# Measured on the CPU with a vocabulary of 151,936, or counted: bytes for one logit while a piece of logits is computed.
LOGIT_BYTES = 22
DRAWN_BYTES = 28  # the same where a token is drawn: logits, log-probs, probs, these and their sums in float64
LOGITS_AT_ONCE = 2**27  # of `stppo.policy.policy`
ROWS_AT_ONCE = 16  # of `stppo.rollout.mismatch`, where micro-batches have no budget
TRANSIENT = 1.5  # of one layer's activations: they and the gradients on the way back
PREFILLED_AT_ONCE = 1 / 4  # of the lanes, in `stppo.rollout.lanes`


@dataclass(frozen=True)
class Phase:
    """What is in the GPU's memory in one phase of an iteration: bytes by name."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Algorithm:
    """What of an algorithm costs memory and time: a critic, and scalars whose gradient norms are watched at once."""

    critic: bool
    watched: int
    exact_norm: bool

    @classmethod
    def of(cls, run: RunConfig, objective) -> "Algorithm":
        """objective: the built `stppo.objectives.Objective` of the run."""
        training, stabilizer = run.training, objective.stabilizer
        extra = training.kl_coefficient or training.entropy_coefficient or hasattr(stabilizer, "kl")
        return cls(
            objective.credit.needs_critic and training.values == "critic",
            2 if extra else 1,
            stabilizer.estimator == "exact",
        )


def trained_parameters(run: RunConfig, shape: Shape, critic: bool = False) -> int:
    """How many numbers the optimizer of the policy (or of the critic) changes."""
    lora, top = run.policy.lora, trained_layers(run, shape)
    own = shape.body if critic else shape.parameters
    if top < shape.layers:
        own = top * shape.layer + shape.norm + (0 if critic or shape.tied else _output_layer(shape))
    adapters = 0 if lora is None else lora.rank * shape.lora_inputs * top // shape.layers
    return (own if lora is None else adapters) + (shape.hidden + 1 if critic else 0)


def trained_layers(run: RunConfig, shape: Shape) -> int:
    """Layers that training's passes with gradients go through."""
    return min(run.policy.trainable_layers or shape.layers, shape.layers)


def is_divided(run: RunConfig, shape: Shape) -> bool:
    """Whether policy, reference and critic share frozen layers, of which a batch keeps the states."""
    return trained_layers(run, shape) < shape.layers


def _output_layer(shape: Shape) -> int:
    return shape.vocabulary * shape.hidden


def optimizer_bytes(name: str) -> float:
    """For one parameter: two moments of float32; of one byte with a scale for each 256; none."""
    return {"adam": 8.0, "adam8bit": 2 + 8 / 256, "sgd": 0.0}[name]


def resting(run: RunConfig, shape: Shape, algorithm: Algorithm) -> dict[str, float]:
    """What stays in the GPU's memory from the first update on, gradients not among it."""
    training = run.training
    frozen = 2 if training.precision == "bfloat16" else 4
    trained, divided = trained_parameters(run, shape), is_divided(run, shape)
    plain = run.policy.lora is None
    parts = {"policy": 4 * shape.parameters if plain else frozen * shape.parameters + 4 * trained}
    if plain and run.scores_reference:
        parts["reference"] = frozen * shape.linear + 4 * (shape.parameters - shape.linear)
        if divided:
            parts["reference"] = 4 * trained
    parts[f"policy: {training.optimizer}"] = optimizer_bytes(training.optimizer) * trained
    if algorithm.critic:
        values = trained_parameters(run, shape, critic=True)
        kind = "adam8bit" if training.optimizer == "adam8bit" else "adam"
        own = trained_layers(run, shape) * shape.layer + shape.norm if divided else shape.body
        parts["critic"] = 4 * values + (0 if plain else frozen * own)
        parts[f"critic: {kind}"] = optimizer_bytes(kind) * values
    if divided:
        batches = training.staleness_iterations + 2  # the queue, and the one that is trained on
        tokens = training.trajectories_per_iteration * longest(run, shape)
        parts["states of frozen layers"] = 4 * shape.hidden * tokens * batches
    return parts


def saved_by_layer(run: RunConfig, shape: Shape) -> float:
    """Bytes that autograd keeps of one layer for one token.

    Counted on Qwen2 as transformers computes it. Under autocast the stream beside the layers stays float32 and each
    linear layer keeps a bfloat16 copy of its input.
    """
    h, kv, i = shape.hidden, shape.key_width, shape.intermediate
    half = run.training.precision == "bfloat16"
    own = 30 * h + 4 * kv + 8 * i if half else 32 * h + 8 * kv + 16 * i
    if run.policy.attention == "eager":
        own += (6 if half else 4) * shape.heads * longest(run, shape)
    return own


def longest(run: RunConfig, shape: Shape) -> int:
    return min(run.rollout.max_tokens, shape.positions)


def micro_batch_tokens(run: RunConfig, shape: Shape, rows: int | None = None) -> tuple[int, bool]:
    """Tokens in one pass of an update at most, and whether a minibatch takes several passes. rows: of the minibatch; None:
    of training's."""
    training, row = run.training, longest(run, shape)
    rows = training.trajectories_per_iteration // training.minibatches if rows is None else rows
    minibatch, budget = rows * row, training.micro_batch_tokens
    if budget is None or minibatch <= budget:
        return minibatch, False
    return max(budget // row, 1) * row, True


def phases_of(run: RunConfig, shape: Shape, algorithm: Algorithm, gpu: float | None) -> list[Phase]:
    """The phases of a run. gpu: its bytes, of which vLLM takes its share; None: all is in the host's memory.

    warm start: a supervised step or an evaluation. resumption, without a GPU: a checkpoint is read whole. roll-out:
    sampling. evaluation: sampling in PyTorch, with as many lanes as it asks questions. scoring: log-probs of policy and
    reference, values. critic, update: their passes back.
    """
    training, rollout = run.training, run.rollout
    half = training.precision == "bfloat16"
    kept = resting(run, shape, algorithm)
    asleep = _asleep(run, shape, gpu)
    copies = _copies(run, shape)
    tokens, several = micro_batch_tokens(run, shape)
    scored = tokens
    if run.scores_anew and training.micro_batch_tokens is None:
        scored = max(tokens, ROWS_AT_ONCE * longest(run, shape))
    copied_head = _copied_head(run, shape)
    scoring = {
        "activations": scored * _passing(shape, half),
        "logits": LOGIT_BYTES * _logits(run, shape, scored) + copied_head,
        "bfloat16 copies of weights": copies,
    }
    back = {
        "activations": tokens * _activations(run, shape, trained_layers(run, shape)),
        "bfloat16 copies of weights": copies,
    }
    trained = trained_parameters(run, shape)
    head = 8 * _output_layer(shape) if run.policy.lora is None else 0
    if is_divided(run, shape) and shape.tied:
        head = 0  # it stays as it is
    buffers = 4 * trained * (algorithm.watched + 1 if several else 1)
    update = back | {
        "gradient": 4 * trained,
        "logits": LOGIT_BYTES * _logits(run, shape, tokens) + copied_head,
        "gradient of the output layer": head,
        "gradients for watched norms": buffers,
    }
    stepping = {"gradient": 4 * trained, "policy before the step": 4 * trained}
    if sum(stepping.values()) > sum(update.values()):
        update = stepping
    asked = training.trajectories_per_iteration
    if training.values == "monte_carlo" or (run.evaluation.value_error_every and algorithm.critic):
        asked = max(
            asked, getattr(rollout, "batch_size", 0)
        )  # trajectories are played on from many of their states
    phases = {"warm start": _warm_start(run, shape, gpu)}
    if gpu is None:
        weights = {
            name: size for name, size in kept.items() if ": " not in name
        }  # optimizers take the file's states
        phases["resumption"] = weights | {
            "checkpoint while it is read": checkpoint_bytes(run, shape, algorithm)
        }
    phases["roll-out"] = kept | _sampling(run, shape, gpu, asked)
    if rollout.engine == "torch":
        phases["evaluation"] = kept | _sampling(run, shape, gpu, run.evaluation.questions)
    phases["scoring"] = kept | scoring | asleep
    if algorithm.critic:
        gradient = 4 * trained_parameters(run, shape, critic=True)
        phases["critic"] = kept | back | {"gradient": gradient} | asleep
    phases["update"] = kept | update | asleep
    return [Phase(name, _with_overhead(parts, gpu is not None)) for name, parts in phases.items()]


def _asleep(run: RunConfig, shape: Shape, gpu: float | None) -> dict[str, float]:
    """What vLLM keeps while it does not sample; nothing in PyTorch."""
    if run.rollout.engine != "vllm":
        return {}
    if gpu is not None and run.rollout.sleep_level:
        return {"vLLM, asleep": ASLEEP}
    return _sampling(run, shape, gpu, 0)


def _sampling(run: RunConfig, shape: Shape, gpu: float | None, asked: int) -> dict[str, float]:
    """What sampling takes where so many trajectories are asked for: vLLM its share, PyTorch as much as its lanes."""
    rollout = run.rollout
    if rollout.engine == "vllm":
        room = engine_room(run, shape, 0)
        whole = room.weights + rollout.max_num_seqs * room.trajectory
        return {"vLLM": whole if gpu is None else rollout.gpu_memory_utilization * gpu}
    half, row = run.training.precision == "bfloat16", longest(run, shape)
    lanes = min(rollout.batch_size, asked)
    fed = min(row, max(run.world.get("max_start_tokens") or row, observation_tokens(run.world)))
    return {
        "KV cache": shape.kv_values() * (3 if half else 4) * lanes * row,
        "logits": DRAWN_BYTES * lanes * shape.vocabulary + _copied_head(run, shape),
        "activations": PREFILLED_AT_ONCE * lanes * fed * _passing(shape, half),
        "bfloat16 copies of weights": _copies(run, shape),
    }


def _warm_start(run: RunConfig, shape: Shape, gpu: float | None) -> dict[str, float]:
    """A supervised step or an evaluation, whichever takes more; between steps gradients stay. Of frozen weights, too, it
    holds float32."""
    settings, half = run.warm_start, run.training.precision == "bfloat16"
    asked = max(settings.final_samples, settings.evaluate_questions, run.evaluation.questions)
    sampling, parts = _sampling(run, shape, gpu, asked), {"policy": 4 * shape.parameters}
    if not settings.max_steps:
        return parts | sampling
    trained, layers, head = shape.parameters, shape.layers, 8 * _output_layer(shape)
    if settings.trained_weights == "policy" and (run.policy.lora or is_divided(run, shape)):
        trained, layers, head = trained_parameters(run, shape), trained_layers(run, shape), 0
        parts["policy"] += 4 * trained if run.policy.lora else 0
    parts |= {"adam": optimizer_bytes("adam") * trained, "gradient": 4 * trained}
    tokens, _ = micro_batch_tokens(run, shape, settings.batch_size)
    step = {
        "activations": tokens * _activations(run, shape, layers),
        "logits": LOGIT_BYTES * _logits(run, shape, tokens),
        "gradient of the output layer": head,
        "bfloat16 copies of weights": 2 * shape.linear if half else 0,
    } | _asleep(run, shape, gpu)
    return parts | max(step, sampling, key=lambda taken: sum(taken.values()))


def _copies(run: RunConfig, shape: Shape) -> float:
    """Of weights in bfloat16, which autocast makes; frozen beside adapters they are bfloat16 already."""
    return 2 * shape.linear if run.training.precision == "bfloat16" and run.policy.lora is None else 0


def _copied_head(run: RunConfig, shape: Shape) -> float:
    """The output layer computes in float32; frozen beside adapters it is copied to it."""
    half = run.training.precision == "bfloat16"
    return 4 * _output_layer(shape) if half and run.policy.lora is not None else 0


def _passing(shape: Shape, half: bool) -> float:
    """Bytes for one token of a pass without gradients: those of one layer."""
    return (12 if half else 16) * shape.hidden + (8 if half else 16) * shape.intermediate


def _logits(run: RunConfig, shape: Shape, tokens: int) -> int:
    """Logits computed at once: of agent tokens, as many as the world allows, in pieces."""
    row = longest(run, shape)
    turns, most = (run.world.get(name) for name in ("turn_budget", "max_turn_tokens"))
    agent = min(row, (turns + 1) * most) if turns and most else row
    agents = -(-tokens * agent // row)
    return min(agents, max(1, LOGITS_AT_ONCE // shape.vocabulary)) * shape.vocabulary


def _activations(run: RunConfig, shape: Shape, layers: int) -> float:
    """Bytes for one token of a pass with gradients through so many layers."""
    layer = saved_by_layer(run, shape)
    if not run.training.gradient_checkpointing:
        return (layers - 1 + TRANSIENT) * layer
    stream = 2 if run.policy.lora is not None and run.training.precision == "bfloat16" else 4
    return layers * stream * shape.hidden + TRANSIENT * layer


def _with_overhead(parts: dict[str, float], on_gpu: bool) -> dict[str, float]:
    own = sum(size for name, size in parts.items() if not name.startswith("vLLM"))
    lost = own * (FRAGMENTATION if on_gpu else HOST_FRAGMENTATION)
    parts = {name: size for name, size in parts.items() if size} | {"fragmentation": lost}
    return parts | {"CUDA": CUDA_CONTEXT} if on_gpu else parts


@dataclass(frozen=True)
class EngineRoom:
    """vLLM's weights, what its share of the GPU leaves for its KV cache, and one longest trajectory there, in bytes."""

    weights: float
    cache: float
    trajectory: float

    @property
    def trajectories(self) -> int:
        return max(0, int(self.cache // self.trajectory))


def engine_room(run: RunConfig, shape: Shape, total: float) -> EngineRoom:
    """vLLM holds weights of its own, the output layer untied."""
    rollout = run.rollout
    size = {"float32": 4, "bfloat16": 2, "float16": 2}.get(rollout.dtype)
    if size is None:  # what the policy computes in
        size = 2 if run.training.precision == "bfloat16" else 4
    untied = shape.parameters + (shape.vocabulary * shape.hidden if shape.tied else 0)
    cache = rollout.gpu_memory_utilization * total - size * untied - ENGINE_STEP
    one = size * shape.kv_values() * longest(run, shape)
    return EngineRoom(size * untied, cache, one)


def checkpoint_bytes(run: RunConfig, shape: Shape, algorithm: Algorithm) -> float:
    """A checkpoint: what is trained, in float32, with its optimizer states; the queue is small beside it."""
    training = run.training
    size = (4 + optimizer_bytes(training.optimizer)) * trained_parameters(run, shape)
    if algorithm.critic:
        kind = "adam8bit" if training.optimizer == "adam8bit" else "adam"
        size += (4 + optimizer_bytes(kind)) * trained_parameters(run, shape, critic=True)
    return size


def host_parts(run: RunConfig, shape: Shape, algorithm: Algorithm, on_gpu: bool) -> dict[str, float]:
    """Host memory beside the phases. With a GPU at its peak, which is a resumption: the whole checkpoint is read before it
    moves to the GPU. Without, that is one of the phases."""
    training, world = run.training, run.world
    real = "BenchmarkWorld" in world["_target_"]
    vllm = run.rollout.engine == "vllm"
    local = _record_files(world)
    large = vllm or on_gpu or (real and local is None)
    questions = QUESTIONS if local is None else READ_FILE * sum(file.stat().st_size for file in local)
    parts = {
        "process": PROCESS if large else PLAIN_PROCESS,
        "questions": questions if real else 0.0,
        "queue": (training.staleness_iterations + 1)
        * training.trajectories_per_iteration
        * longest(run, shape)
        * QUEUE_TOKEN,
    }
    if on_gpu:
        parts["checkpoint or weights while they are read"] = max(
            checkpoint_bytes(run, shape, algorithm), 4.0 * shape.parameters
        )
    if vllm and run.rollout.sleep_level == 1:
        parts["vLLM's weights, asleep"] = engine_room(run, shape, 0).weights
    return {name: size for name, size in parts.items() if size}


def _record_files(world: dict) -> list[Path] | None:
    """The files of questions that a world names, None where some are not here."""
    named = world.get("records")
    places = [named] if isinstance(named, str) else list((named or {}).values())
    if not places or not all(isinstance(place, str) and Path(place).exists() for place in places):
        return None
    found = [[Path(p)] if Path(p).is_file() else list(Path(p).rglob("*")) for p in places]
    return [file for files in found for file in files if file.is_file()]


def disk_parts(run: RunConfig, shape: Shape, algorithm: Algorithm, to_download: bool) -> dict[str, float]:
    """New files of one run; to_download: weights and data come from the hub."""
    parts = {
        "weights from the hub": 2.0 * shape.parameters if to_download else 0.0,
        "data from the hub": HUB_DATA if to_download else 0.0,
        "warm start": 4.0 * shape.parameters,
        "checkpoint, and the one before it": 2 * checkpoint_bytes(run, shape, algorithm),
        "trained policy": 4.0 * shape.parameters,
    }
    return {name: size for name, size in parts.items() if size}


def observation_tokens(world: dict) -> int:
    """Most tokens of one observation that a world allows; a word is taken for 1.4 tokens where it counts words."""
    defaults = {name: field.default for name, field in Protocol.__dataclass_fields__.items()}
    limit = world.get("max_observation_tokens", defaults.get("max_observation_tokens"))
    words = world.get("max_information_words") or 0
    return int(min(limit or 10**9, 1.4 * words or 10**9))
