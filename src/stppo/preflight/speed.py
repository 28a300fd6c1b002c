"""How long an iteration takes, from floating-point operations and bytes moved; everything assumed stands first."""

from dataclasses import dataclass

from stppo.config.settings import RunConfig
from stppo.preflight.memory import Algorithm, longest, observation_tokens, trained_layers
from stppo.preflight.shapes import Shape

# Dense bfloat16 FLOP/s and bytes/s of memory: NVIDIA's data sheets. The first fragment found in a device's name counts.
GPUS = {
    "H200": (989e12, 4.8e12),
    "H100 PCIe": (756e12, 2.0e12),
    "H100": (989e12, 3.35e12),
    "A100": (312e12, 2.04e12),
    "L40S": (362e12, 0.864e12),
    "A10": (125e12, 0.6e12),
    "4090": (165e12, 1.008e12),
    "3090": (71e12, 0.936e12),
}
USUAL = "A100"

# Assumptions: what share of the peak is reached, and what a run does.
MFU_TRAINING = 0.35  # forward and backward passes of large matrices
MFU_PREFILL = 0.40
BANDWIDTH = 0.60  # while decoding
STEP_SECONDS = 0.006  # of one decoding step besides the GPU's work
FLOAT32 = 1 / 16  # speed of float32 relative to bfloat16
AGENT_TOKENS = 120  # of a turn, where the world allows as many
SEARCHES = 2  # of a trajectory, where the world allows as many
PROMPT_TOKENS = 200  # with Search-R1's instruction
SEARCHES_PER_SECOND = 13.0  # BM25 over Wikipedia, one thread: results/reference/retrieval.md, extrapolated


@dataclass(frozen=True)
class Speed:
    """Seconds of one iteration by phase, and of the whole run; `gpu` names whose figures were taken."""

    gpu: str
    trajectory_tokens: int
    agent_tokens: int
    seconds: dict[str, float]
    iterations: int

    @property
    def iteration(self) -> float:
        return sum(self.seconds.values())

    @property
    def hours(self) -> float:
        return self.iterations * self.iteration / 3600


def estimate_speed(
    run: RunConfig,
    shape: Shape,
    algorithm: Algorithm,
    gpu: str = USUAL,
    searches_per_second: float | None = None,
) -> Speed:
    """One iteration on a GPU. gpu: device name; an unknown one is taken for an A100."""
    name = next((fragment for fragment in GPUS if fragment in gpu), USUAL)
    peak, bandwidth = GPUS[name]
    training, rollout, world = run.training, run.rollout, run.world
    if training.precision == "float32":
        peak *= FLOAT32
    n = training.trajectories_per_iteration
    searches = min(SEARCHES, world.get("turn_budget", SEARCHES))
    agent = (searches + 1) * min(AGENT_TOKENS, world.get("max_turn_tokens", AGENT_TOKENS))
    read = min(PROMPT_TOKENS, longest(run, shape) // 3) + searches * observation_tokens(world)
    length = min(longest(run, shape), agent + read)
    agent = min(agent, length)

    def roll_out(rows: float) -> float:
        """Seconds to play so many trajectories, decoding at most `lanes` at once."""
        lanes = min(rows, rollout.max_num_seqs if rollout.engine == "vllm" else rollout.batch_size)
        size = 2 if training.precision == "bfloat16" else 4
        moved = size * (shape.parameters + lanes * length / 2 * shape.kv_values())
        step = max(moved / (BANDWIDTH * bandwidth), 2 * shape.parameters * lanes / (MFU_PREFILL * peak))
        decode = rows / lanes * agent * (step + STEP_SECONDS)
        prefill = 2 * shape.parameters * rows * (length - agent) / (MFU_PREFILL * peak)
        return decode + prefill

    trained = trained_layers(run, shape) / shape.layers

    def passes(flops: float, with_head: bool = True, depth: float = trained) -> float:
        """`flops` per weight and token over all trajectories; attention's own add 4 T H a layer and two. The output
        layer is passed by the agent's tokens alone, in float32. depth: share of the layers that are passed."""
        attention = 2 * length * shape.hidden * shape.layers
        slower = 1 if training.precision == "float32" else 1 / FLOAT32
        head = slower * agent * shape.vocabulary * shape.hidden if with_head else 0
        return flops * n * (depth * (shape.linear + attention) * length + head) / (MFU_TRAINING * peak)

    back = 4 if run.policy.lora is None else 2  # frozen weights need no gradient of their own
    again = 2 if training.gradient_checkpointing else 0
    several = training.micro_batch_tokens is not None and (
        n // training.minibatches * length > training.micro_batch_tokens
    )
    watched = algorithm.watched / training.bias_norm_every
    if algorithm.exact_norm:
        watched = 1 + (algorithm.watched - 1) / training.bias_norm_every
    update = 2 + back + again + (2 if several else 0) + watched * (back + again)
    scored = run.scores_anew + run.scores_reference
    # A roll-out in PyTorch leaves the states of frozen layers behind; beside vLLM they are computed for both.
    below = 2 * (run.scores_anew + 1) if rollout.engine == "vllm" else 0
    seconds = {
        "roll-out": roll_out(n),
        "search": n * searches / (searches_per_second or SEARCHES_PER_SECOND),
        "scoring": passes(2 * scored)
        + (passes(2, with_head=False) if algorithm.critic else 0)
        + passes(below, False, 1 - trained),
        "critic": training.critic_epochs * passes(2 + back + again, False) if algorithm.critic else 0.0,
        "update": training.epochs * passes(update),
        "evaluation": roll_out(run.evaluation.questions)
        * (1 / run.evaluation.every + 1 / run.evaluation.greedy_every),
    }
    if "BenchmarkWorld" not in world["_target_"]:
        seconds["search"] = 0.0  # in memory
    return Speed(name, length, agent, {k: s for k, s in seconds.items() if s}, training.iterations)
