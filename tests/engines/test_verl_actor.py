"""verl's own actor, on two Ray workers, trained by our loss; and the same updates by a plain loop of ours.

Everything from the worker group down is verl's: the dispatch of the batch over workers, `ActorRolloutRefWorker`, its FSDP2
engine with gradient accumulation, clipping and AdamW, `ppo_loss`, and the way the metrics come back.

verl 0.9.1 has no CPU among its platforms. What stands in for one, all of it in tests/engines, no code of verl patched:

- `verl_on_cpu` fills in verl's interface for platforms; without it `current_device` asks for CUDA
  (verl/plugin/platform/platform_cuda.py:73). It begins the workers' gloo group, too.
- VERL_ENGINE_DEVICE=cuda, a switch of verl's, picks the FSDP engine, which is registered for GPUs alone
  (verl/workers/engine/fsdp/transformer_impl.py:1143).
- The strategy is fsdp2: FSDP1 was not tried on a CPU.
- TRL is hidden from these processes: beside TRL 1.16, verl 0.9.1's actor does not start, on any device
  (verl/models/transformers/monkey_patch.py:352).

What is left to a GPU: FSDP1, NCCL, bfloat16, flash-attn's packed rows. The roll-out: test_verl_whole.py.
"""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stppo.objectives import (
    Clip,
    ClippingBiasNorm,
    CtnKL,
    NoStabilizer,
    Objective,
    Ratio,
    TokenGAE,
    estimated_bias_norms,
)
from stppo.trajectories import Trajectories

pytest.importorskip("verl")
pytest.importorskip("ray")
pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
WORKERS, ROWS, MINI, EPOCHS = 2, 8, 4, 2  # each worker takes its half of the rows, one at a time
PROMPT, RESPONSE = 6, 24
RATE, WEIGHT_DECAY, CLIP_GRAD = 1e-3, 0.01, 0.3
C0 = 0.05
TOLERANCE = 2e-6  # of a weight, in float32; found: 7e-7 (sharded) and 9e-8 (replicated), of moves of 2e-3
ACTOR, LOSS = "actor_rollout_ref.actor", "actor_rollout_ref.actor.policy_loss"
SHARED = [
    f"{ACTOR}.ppo_mini_batch_size={MINI}",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    f"{ACTOR}.ppo_epochs={EPOCHS}",
    f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    f"{ACTOR}.clip_ratio_low=0.2",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.optim.lr={RATE}",
    f"{ACTOR}.optim.weight_decay={WEIGHT_DECAY}",
    f"{ACTOR}.grad_clip={CLIP_GRAD}",
    f"{ACTOR}.optim.clip_grad={CLIP_GRAD}",
]
OURS = [f"{LOSS}._target_=stppo.plugins.verl.TurnPolicyLossConfig", f"+{LOSS}.c0={C0}"]
RUNS = {
    "st_ppo, sharded": [*SHARED, *OURS, f"{LOSS}.loss_mode=st_ppo", f"{ACTOR}.fsdp_config.fsdp_size=-1"],
    "so_ppo, replicated": [
        *SHARED,
        *OURS,
        f"{LOSS}.loss_mode=so_ppo",
        f"+{LOSS}.reading=B",
        f"{ACTOR}.fsdp_config.fsdp_size=1",
    ],
}


def objective(ratio, stabilizer, mean="trajectory_mean") -> Objective:
    return Objective(TokenGAE(), ratio, Clip(0.2, 0.28), stabilizer, mean)


OBJECTIVES = {
    "st_ppo, sharded": objective(Ratio("turn"), ClippingBiasNorm(c0=C0, estimator="logprob")),
    "so_ppo, replicated": objective(Ratio("turn", "arithmetic"), CtnKL(), "turn_mean"),
}


def model_folder(folder: Path) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    shape = LlamaConfig(
        vocab_size=64,
        **sizes,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=1,
    )
    LlamaForCausalLM(shape).float().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="</s>").save_pretrained(
        folder
    )
    return folder


def a_batch() -> dict[str, torch.Tensor]:
    """Rows as verl has them: prompts padded on the left, responses of one to three turns on the right. `moved` is how far
    the behaviour's log-probs lie from the policy's."""
    random = torch.Generator().manual_seed(1)
    lengths, starts = [24, 20, 22, 17, 24, 23, 19, 24], [0, 2, 1, 3, 0, 4, 2, 1]
    agent = torch.zeros(ROWS, RESPONSE, dtype=torch.long)
    attention = torch.ones(ROWS, PROMPT + RESPONSE, dtype=torch.long)
    for i, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        agent[i, : 1 + i % 4] = 1
        agent[i, 7 : 8 + i % 5] = 1
        agent[i, 14 : 14 + i % 3] = 1
        attention[i, :start] = attention[i, PROMPT + length :] = 0
    tokens = torch.randint(2, 64, attention.shape, generator=random).where(attention.bool(), 1)
    return {
        "prompts": tokens[:, :PROMPT],
        "responses": tokens[:, PROMPT:],
        "input_ids": tokens,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "response_mask": agent,
        "advantages": torch.randn(agent.shape, generator=random) * agent,
        "moved": 0.5 * torch.randn(agent.shape, generator=random) * agent,
    }


def log_probs_of(model, batch) -> torch.Tensor:
    """(B, RESPONSE), each row on its own and without its padding."""
    rows = []
    for tokens, attention in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        ids = tokens[attention]
        found = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        found = found[int(attention[:PROMPT].sum()) - 1 :]
        rows.append(torch.nn.functional.pad(found, (0, RESPONSE - len(found))))
    return torch.stack(rows)


def updated(folder: Path, batch, spec: Objective):
    """(model, metrics per update) of the plain loop: one process, `spec` on each row, AdamW. No line of verl's."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        behaviour = log_probs_of(model, batch) + batch["moved"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=WEIGHT_DECAY)
    own, each = ROWS // WORKERS, MINI // WORKERS
    metrics = []
    for _ in range(EPOCHS):
        for k in range(own // each):
            rows = [own * worker + each * k + i for worker in range(WORKERS) for i in range(each)]
            optimizer.zero_grad()
            found = []
            for row in rows:
                part = {name: value[row : row + 1] for name, value in batch.items()}
                log_probs = torch.nn.functional.pad(log_probs_of(model, part), (1, 0))
                got = spec(log_probs, trajectories(part, behaviour[row : row + 1]), front(part["advantages"]))
                # Squares of the norms of a minibatch's rows add, and each row has a weight of 1 / MINI in it.
                norm = estimated_bias_norms(got, log_probs)["clipping_bias_norm_logprob"] / MINI**0.5
                divisor = spec.stabilizer.divisor(norm)
                (got.loss / divisor / MINI).backward()
                found.append({"norm": norm, "divisor": divisor, **got.diagnostics})
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
            optimizer.step()
            metrics.append(
                {name: sum(row[name] for row in found) / len(found) for name in found[0]}
                | {"grad_norm": norm}
            )
    return model, metrics


def front(tensor):
    """With one column more, for the prompt, which verl keeps apart."""
    return torch.nn.functional.pad(tensor, (1, 0))


def trajectories(part, behaviour) -> Trajectories:
    mask = front(part["response_mask"]).bool()
    return Trajectories(
        tokens=torch.zeros(mask.shape, dtype=torch.int64),
        lengths=torch.full((len(mask),), mask.shape[1]),
        agent_mask=mask,
        behaviour_logprobs=front(behaviour) * mask,
        rewards=torch.zeros(mask.shape),
        group_ids=torch.arange(len(mask)),
        policy_updates=torch.zeros(len(mask), dtype=torch.int64),
    )


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """(folder, batch, results): what verl made of the batch, per run, in processes of its own."""
    folder = tmp_path_factory.mktemp("verl")
    model_folder(folder / "model")
    batch = a_batch()
    torch.save(batch, folder / "batch.pt")
    (folder / "runs.json").write_text(json.dumps(RUNS))
    environment = os.environ | {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "tests.engines.verl_on_cpu",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray leaves one in the home folder
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.verl_actor", folder],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return folder, batch, torch.load(folder / "result.pt")


def gap(whole, model) -> float:
    """Largest difference between weights by name and a model's."""
    return max(float((whole[name] - weight).abs().max()) for name, weight in model.state_dict().items())


def test_the_workers_are_processes_of_their_own_and_hold_what_their_strategy_says(played):
    for name, result in played[2].items():
        first, second = result["after"]
        assert len({first["pid"], second["pid"], os.getpid()}) == WORKERS + 1
        for weight, one, other in zip(
            first["own"], first["own"].values(), second["own"].values(), strict=True
        ):
            whole = first["whole"][weight]
            if "sharded" in name:
                assert torch.equal(torch.cat([one, other]), whole) and 0 < len(one) < len(whole)
            else:
                assert one.shape == other.shape == whole.shape


def test_both_workers_end_with_the_same_weights(played):
    """To the last bit. Replicated, each worker has all weights and steps them itself."""
    for name, result in played[2].items():
        first, second = result["after"]
        assert all(torch.equal(weight, second["whole"][key]) for key, weight in first["whole"].items())
        if "replicated" in name:
            assert all(torch.equal(weight, second["own"][key]) for key, weight in first["own"].items())


def test_the_actors_log_probs_are_the_models(played):
    from transformers import LlamaForCausalLM

    folder, batch, results = played
    with torch.no_grad():
        expected = log_probs_of(LlamaForCausalLM.from_pretrained(folder / "model"), batch)
    agent = batch["response_mask"].bool()
    for result in results.values():
        torch.testing.assert_close(result["log_probs"][agent], expected[agent], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_the_weights_are_those_of_a_plain_loop_with_our_loss(played, name):
    folder, batch, results = played
    model, _ = updated(folder / "model", batch, OBJECTIVES[name])
    (before, _), (after, _) = results[name]["before"], results[name]["after"]
    moved = torch.cat(
        [(after["whole"][key] - weight).abs().flatten() for key, weight in before["whole"].items()]
    )
    found = gap(after["whole"], model)
    print(
        f"{name}: weights moved by {moved.median():.2g} (median), {moved.max():.2g} (most); apart by {found:.2g}"
    )
    assert found < TOLERANCE < moved.median() / 100
    # What another loss would have made of it is far away: so it was ours.
    for other in (
        objective(Ratio("token"), NoStabilizer()),
        objective(OBJECTIVES[name].ratio, NoStabilizer()),
    ):
        apart = gap(after["whole"], updated(folder / "model", batch, other)[0])
        assert apart > 20 * TOLERANCE, f"{other}: {apart:.2g}"


@pytest.mark.parametrize("name", RUNS)
def test_the_plug_ins_metrics_come_back(played, name):
    """One number an update, the mean over both workers' micro-batches."""
    folder, batch, results = played
    _, expected = updated(folder / "model", batch, OBJECTIVES[name])
    found = results[name]["metrics"]
    updates = EPOCHS * ROWS // MINI
    for theirs, ours in {
        "actor/pg_clipfrac": "clip_fraction",
        "actor/ppo_kl": "kl_behaviour_k1",
        "actor/clip_fraction_turn": "turn_fully_clipped_fraction",
        "actor/clipping_bias_norm_logprob": "norm",
        "actor/stabilizer_divisor": "divisor",
        "actor/ctn_penalty": "ctn_penalty",
        "grad_norm": "grad_norm",
    }.items():
        assert len(found[theirs]) == updates
        assert [float(value) for value in found[theirs]] == pytest.approx(
            [float(row[ours]) for row in expected], rel=1e-3, abs=1e-5
        ), theirs
    assert min(float(value) for value in found["actor/pg_clipfrac"]) > 0.02
    acting = "actor/stabilizer_divisor" if name.startswith("st_ppo") else "actor/ctn_penalty"
    assert min(float(value) for value in found[acting]) > (1.05 if name.startswith("st_ppo") else 0.001)
