"""The training loop: what is recorded, resuming, damage, non-finite numbers, staleness, steps."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.config.provenance import environment
from stppo.files import write_atomically
from stppo.policy.policy import load_policy
from stppo.record.ownership import FolderInUse
from stppo.record.schema import ENGINE_COLUMNS, EVALUATION_COLUMNS, RUN_FIELDS, TIMING_COLUMNS, UPDATE_COLUMNS
from stppo.training.checkpoint import newest
from stppo.training.run import Run
from stppo.training.warm_start import encode_episode, load_warm_start, warm_start
from stppo.world.encoding import DialogueEncoder
from tests.conftest import TINY
from tests.training_runs import assert_same_metrics, interrupted, run, tables


def test_peak_memory_is_not_that_of_the_process_that_started_this_one():
    ask = "from stppo.training.metrics import peak_memory_mb; print(peak_memory_mb())"
    big = f"import subprocess, sys; b'1' * (2 << 30); subprocess.run([sys.executable, '-c', {ask!r}], check=True)"
    said = subprocess.run([sys.executable, "-c", big], capture_output=True, text=True, check=True).stdout
    assert 50 < float(said) < 1500


def test_a_run_says_which_weights_it_began_from(tmp_path, tiny, barely_trained):
    other = tmp_path / "other"
    shutil.copytree(barely_trained, other)
    policy = load_policy(other)
    with torch.no_grad():
        policy.lm_head.weight[0, 0] += 1
    policy.save_pretrained(other)
    brief = tiny("training.iterations=1", "evaluation.every=9")
    records = [run(brief, tmp_path / f"run{i}", start) for i, start in enumerate((barely_trained, other))]
    found = [record["warm_start_weights"] for record in records]
    assert found == [load_warm_start(start)[2] for start in (barely_trained, other)]
    assert found[0] != found[1]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, barely_trained) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(compose(TINY), folder, barely_trained)
    return folder


def test_everything_of_the_schema_is_recorded(undisturbed):
    updates, evaluations = tables(undisturbed)
    assert list(updates) == list(UPDATE_COLUMNS) and list(evaluations) == list(EVALUATION_COLUMNS)
    # undefined where no reward was earned; measured on request
    may_be_missing = {
        "critic_explained_variance",
        "critic_value_rmse",
        "true_value_std",
        "sample_divisor",
        *ENGINE_COLUMNS,
    }
    empty = [c for c in updates if updates[c].isna().all() and c not in may_be_missing]
    assert not empty, f"columns never filled: {empty}"
    assert list(updates["update"]) == list(range(1, 5 * 4 + 1))
    assert set(evaluations["temperature"]) == {0.0, 1.0}
    record = json.loads((undisturbed / "run.json").read_text())
    assert set(record) == set(RUN_FIELDS)
    assert record["status"] == "completed" and record["updates"] == 20
    assert record["gpu_peak_memory_mb"] is None, "it ran on a CPU"
    assert len(json.loads((undisturbed / "trajectories.json").read_text())) == 3


def test_staleness_counts_iterations_and_updates(undisturbed):
    updates = tables(undisturbed)[0]
    by_iteration = updates.groupby("iteration").first()
    assert list(by_iteration["staleness_iterations"]) == [0, 1, 2, 2, 2]
    # iteration i starts after 4 (i - 1) updates and trains on what was sampled two iterations before
    assert list(by_iteration["staleness_updates"]) == [0, 4, 8, 8, 8]


ROOT = Path(__file__).parents[1]
KILLED_RUN = """
import os, signal, sys
from stppo.config.composition import compose
from stppo.config.loading import load
from stppo.training.run import Run
from tests.conftest import TINY

def kill(trainer):
    if trainer.iteration == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

Run(load(compose(TINY)), sys.argv[1], sys.argv[2], on_iteration=kill, progress=False).train()
"""


# Checkpoints are written after iterations 2 and 4. The second kill leaves a queue that is already running out.
@pytest.mark.slow
@pytest.mark.parametrize(("killed_after", "kept_iterations"), [(3, 2), (4, 4)])
def test_killed_run_resumes_bit_for_bit(
    killed_after, kept_iterations, undisturbed, tmp_path, tiny, barely_trained
):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("src", "")),
        "OMP_NUM_THREADS": "1",
    }
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_RUN, str(tmp_path), str(barely_trained), str(killed_after)],
        env=environment,
        capture_output=True,
        cwd=tmp_path,
    )
    assert killed.returncode == -9, killed.stderr.decode()[-2000:]
    kept = tables(tmp_path)[0]
    assert len(kept) == kept_iterations * 4, "what was measured before the checkpoint is on disk"
    its_run = Run(load(tiny()), tmp_path, barely_trained, progress=False)
    trainer = its_run.trainer
    its_run.train()
    assert len(trainer.update_rows) == 20
    assert_same_metrics(undisturbed, tmp_path)


def elsewhere(monkeypatch, cpu="another CPU"):
    """What comes now runs on another machine."""
    found = {"versions": {"python": "3.99"}, "hardware": {"cpu": cpu}, "git_commit": None, "git_dirty": None}
    monkeypatch.setattr("stppo.training.run.environment", lambda: dict(found))
    return found


def test_finished_run_is_not_repeated(tmp_path, tiny, barely_trained, monkeypatch):
    ended = run(tiny(), tmp_path, barely_trained)
    files = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}  # fmt: skip
    elsewhere(monkeypatch)
    again_run = Run(load(tiny()), tmp_path, barely_trained, progress=False)
    again = again_run.trainer
    assert again_run.train() == ended == json.loads((tmp_path / "run.json").read_text())
    left = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}  # fmt: skip
    assert left.keys() == files.keys() and left == files, "nothing is written, timings and environment too"
    assert again_run.taken_up == 5 and len(again.update_rows) == 20 and len(again.evaluation_rows) >= 3


@pytest.mark.parametrize("lost", ["policy", "updates.parquet"])
def test_a_part_that_a_finished_run_lost_is_written_anew(lost, tmp_path, tiny, barely_trained):
    run(tiny(), tmp_path, barely_trained)
    weights, updates = (tmp_path / "policy" / "model.safetensors").read_bytes(), tables(tmp_path)[0]
    shutil.rmtree(tmp_path / lost) if lost == "policy" else (tmp_path / lost).unlink()
    assert run(tiny(), tmp_path, barely_trained)["status"] == "completed"
    assert (tmp_path / "policy" / "model.safetensors").read_bytes() == weights
    pd.testing.assert_frame_equal(updates, tables(tmp_path)[0], check_exact=True)


def test_a_run_is_not_completed_before_its_weights_are_written(tmp_path, tiny, barely_trained):
    def full(*_):
        raise OSError("no space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr("stppo.training.run.save_policy", full)
        run(tiny(), tmp_path, barely_trained)
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "running"
    assert run(tiny(), tmp_path, barely_trained)["status"] == "completed"
    assert (tmp_path / "policy" / "model.safetensors").is_file()


def test_a_resumed_run_keeps_the_environment_it_began_with(tmp_path, tiny, barely_trained, monkeypatch):
    interrupted(tiny(), tmp_path, barely_trained)
    began = json.loads((tmp_path / "run.json").read_text())
    interrupted(tiny(), tmp_path, barely_trained, after=4)
    there = elsewhere(monkeypatch)
    ended = run(tiny(), tmp_path, barely_trained)
    for name in ("versions", "hardware", "git_commit", "git_dirty", "started"):
        assert ended[name] == began[name], name
    assert ended["resumed_on"] == [there], "the second part ran where the first did"


def test_another_torch_under_a_run_is_said(tmp_path, tiny, barely_trained, monkeypatch, caplog):
    interrupted(tiny(), tmp_path, barely_trained)
    assert "torch" not in caplog.text
    older = environment()["versions"] | {"torch": "1.2.3"}
    state = newest(tmp_path / "checkpoint") / "state.json"
    written = json.loads(state.read_text())
    written["state"]["environment"]["versions"] = older
    state.write_text(json.dumps(written))
    run(tiny(), tmp_path, barely_trained)
    said = [line for line in caplog.messages if "made with torch 1.2.3" in line]
    assert len(said) == 1 and str(tmp_path) in said[0]
    run(tiny(), tmp_path, barely_trained)  # finished: nothing is trained, and it is said of what is there
    assert len([line for line in caplog.messages if "made with torch 1.2.3" in line]) == 2


def test_a_world_without_a_seed_is_recorded_as_world_0(tmp_path, tiny, barely_trained):
    its_run = Run(load(tiny("training.iterations=1")), tmp_path, barely_trained, progress=False)
    trainer = its_run.trainer
    del trainer.config["world"]["seed"]  # as a world of one's own may be
    assert its_run.train()["world_seed"] == 0, "figures group runs by it"


def test_other_run_in_the_same_folder_moves_the_earlier_one_aside(tmp_path, tiny, barely_trained):
    run(tiny("training.iterations=1"), tmp_path, barely_trained)
    before = (tmp_path / "updates.parquet").read_bytes()
    run(tiny("training.iterations=2"), tmp_path, barely_trained, resume="set_aside")
    assert (tmp_path / "earlier-1" / "updates.parquet").read_bytes() == before
    assert {file.name for file in (tmp_path / "earlier-1" / "policy").iterdir()} >= {"model.safetensors"}
    assert len(tables(tmp_path)[0]) == 8


def test_evaluating_more_often_changes_no_training_metric(undisturbed, tmp_path, tiny, barely_trained):
    run(tiny("evaluation.every=1", "evaluation.greedy_every=1"), tmp_path, barely_trained)
    timing = [column for column in TIMING_COLUMNS if column in UPDATE_COLUMNS]
    often, seldom = (tables(folder)[0].drop(columns=timing) for folder in (tmp_path, undisturbed))
    pd.testing.assert_frame_equal(often, seldom, check_exact=True)


@pytest.mark.parametrize(
    ("file", "said"),
    [("state.json", r"checkpoint/\d+"), ("optimizer.safetensors", r"optimizer\.safetensors")],
)
def test_damaged_checkpoint_is_named_and_set_aside_on_request(file, said, tmp_path, tiny, barely_trained):
    interrupted(tiny(), tmp_path, barely_trained)
    damaged = newest(tmp_path / "checkpoint") / file
    damaged.write_bytes(damaged.read_bytes()[:1000])
    with pytest.raises(ValueError, match=rf"checkpoint \S+{said} cannot be read"):
        run(tiny(), tmp_path, barely_trained)
    assert len(tables(tmp_path)[0]) == 8, "recorded metrics survive the error"
    record = run(tiny(), tmp_path, barely_trained, resume="set_aside")
    assert record["status"] == "completed"
    assert len(pd.read_parquet(tmp_path / "earlier-1" / "updates.parquet")) == 8, "and the restart"


# Many updates an iteration: the loss meets it first. One: the parameters do, before anything is sampled.
@pytest.mark.parametrize("updates", [["training.epochs=2"], ["training.epochs=1", "training.minibatches=1"]])
def test_non_finite_numbers_stop_the_run_and_keep_what_was_measured(updates, tmp_path, tiny, barely_trained):
    record = run(
        tiny("training.optimizer=sgd", "training.learning_rate=1e30", *updates), tmp_path, barely_trained
    )
    assert record["status"] == "non_finite"
    assert (
        "non-finite" in record["non_finite"]["what"] and record["non_finite"]["update"] == record["updates"]
    )
    rows, evaluations = tables(tmp_path)
    assert len(rows) == record["updates"] >= 1
    assert np.isfinite(rows["gradient_norm"].iloc[0]) and len(evaluations) >= 1


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_run_that_ended_non_finite_is_not_repeated(checkpoint, tmp_path, tiny, barely_trained):
    def overflow(trainer):
        raise FloatingPointError("a loss is not finite")

    if checkpoint:
        interrupted(tiny(), tmp_path, barely_trained)
    ended = Run(load(tiny()), tmp_path, barely_trained, on_iteration=overflow, progress=False).train()
    assert ended["status"] == "non_finite"
    again_run = Run(load(tiny()), tmp_path, barely_trained, progress=False)
    again = again_run.trainer
    assert again_run.train() == ended, "nothing stops it any more, yet it does not go on"
    rows, evaluations = tables(tmp_path)
    assert len(again.update_rows) == len(rows) >= 1 and len(again.evaluation_rows) == len(evaluations) >= 1
    assert run(tiny(), tmp_path, barely_trained, resume="never")["status"] == "completed"


def test_a_run_that_ended_non_finite_is_made_anew_from_another_start(tmp_path, tiny, barely_trained):
    def overflow(trainer):
        raise FloatingPointError("a loss is not finite")

    start = shutil.copytree(barely_trained, tmp_path / "start")
    folder = tmp_path / "run"
    Run(load(tiny()), folder, start, on_iteration=overflow, progress=False).train()
    (weights,) = start.rglob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: 0.99 * tensor for name, tensor in tensors.items()}, weights, {"format": "pt"})
    assert run(tiny(), folder, start)["status"] == "completed"


def test_non_finite_critic_stops_the_run(tmp_path, tiny, barely_trained):
    record = run(tiny("training.critic_learning_rate=1e30"), tmp_path, barely_trained)
    assert record["status"] == "non_finite" and "critic" in record["non_finite"]["what"]


@pytest.mark.parametrize("order", ["before_divisor", "after_divisor"])
def test_sgd_step_has_the_length_that_clip_and_divisor_give(order, tmp_path, tiny, barely_trained):
    limit, rate = 0.05, 0.5
    overrides = [
        "training.optimizer=sgd",
        f"training.learning_rate={rate}",
        f"training.max_grad_norm={limit}",
    ]
    stabilizer = "algorithm.objective.stabilizer"
    config = tiny(
        *overrides, f"training.clip_order={order}", f"{stabilizer}.form=one_plus", f"{stabilizer}.c0=0.01"
    )
    run(config, tmp_path, barely_trained)
    updates = tables(tmp_path)[0]
    norm, divisor = updates["gradient_norm"], updates["stabilizer_divisor"]
    assert (norm > limit).any() and (divisor > 1).any(), "both must act for the order to matter"
    if order == "before_divisor":
        expected = rate * np.minimum(norm, limit) / divisor
    else:
        expected = rate * np.minimum(norm / divisor, limit)
    np.testing.assert_allclose(updates["update_norm"], expected, rtol=2e-3, atol=1e-7)


def test_bias_norm_is_sampled_where_no_stabilizer_needs_it(tmp_path, tiny, barely_trained):
    run(tiny("algorithm=token_ppo"), tmp_path, barely_trained)
    updates = tables(tmp_path)[0]
    measured = updates[updates["clipping_bias_norm"].notna()]
    assert len(measured) == 5, "one update in four"
    assert set(zip(measured["epoch"], measured["minibatch"], strict=True)) == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_group_algorithm_has_no_critic_and_whole_groups(tmp_path, tiny, barely_trained):
    its_run = Run(
        load(tiny("algorithm=grpo", "training.iterations=1")), tmp_path, barely_trained, progress=False
    )
    trainer = its_run.trainer
    assert trainer.critic is None
    groups = trainer.batches.sample(0, 0).trajectories.group_ids
    assert groups.bincount().tolist() == [8, 8]


@pytest.mark.parametrize("other", ["world.seed=1", "policy.hidden_size=16", "world.n_name_parts=20"])
def test_warm_start_of_another_world_or_policy_is_refused(other, tmp_path, tiny, barely_trained):
    with pytest.raises(ValueError, match="made for another world or policy"):
        Run(load(tiny(other)), tmp_path, barely_trained)


def test_truncated_weights_are_named(tmp_path, tiny, barely_trained):
    damaged = tmp_path / "start"
    shutil.copytree(barely_trained, damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(FileNotFoundError, match="cannot be loaded"):
        Run(load(tiny()), tmp_path / "run", damaged)


def test_missing_warm_start_names_the_remedy(tmp_path, tiny):
    with pytest.raises(FileNotFoundError, match="stppo warm-start"):
        Run(load(tiny()), tmp_path, tmp_path / "nothing")


@pytest.mark.slow
def test_warm_start_learns_until_the_target(tmp_path, tiny):
    easy = tiny("warm_start.target_success=0.01", "warm_start.max_steps=400", "warm_start.demonstrations=512")
    record = warm_start(load(easy), tmp_path, progress=False)
    losses = [row["loss"] for row in record["history"]]
    assert losses[0] > losses[-1] and record["history"][-1]["success"] >= 0.01
    assert record["reading_steps"] == 0 and {row["stage"] for row in record["history"]} == {"searching"}
    policy, loaded, weights = load_warm_start(tmp_path)
    assert loaded["steps"] == record["steps"] and len(weights) == 12
    assert sum(p.numel() for p in policy.parameters()) == record["parameters"]


def test_start_is_measured_on_the_questions_of_the_evaluations(tmp_path, tiny, monkeypatch):
    from stppo.training import warm_start as module

    asked, original = [], module.evaluate

    def evaluate(sampler, policy, questions, **options):
        asked.append([question.id for question in questions])
        return original(sampler, policy, questions, **options)

    monkeypatch.setattr(module, "evaluate", evaluate)
    easy = tiny("warm_start.target_success=0.001", "warm_start.max_steps=400", "evaluation.questions=8")
    warm_start(load(easy), tmp_path, progress=False)
    fixed = [q.id for q in build(easy["world"], "world").questions("validation")[:8]]
    sampled, greedy = asked[-2:]
    assert set(sampled) == set(fixed) and len(sampled) == 256 and greedy == fixed


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.max_tokens=10", "leaves no room for a turn"),
        ("evaluation.questions=1000000", "only 32 validation"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is_trained(
    override, said, tmp_path, tiny, monkeypatch
):
    monkeypatch.setattr("stppo.training.warm_start._supervised_step", None)
    with pytest.raises(ValueError, match=said):
        warm_start(load(tiny(override)), tmp_path, progress=False)


def test_a_file_in_the_place_of_the_weights_is_named_before_training(tmp_path, tiny, barely_trained):
    (tmp_path / "policy").write_text("")
    with pytest.raises(FileExistsError, match="policy: a file is in the way"):
        run(tiny(), tmp_path, barely_trained)
    assert not (tmp_path / "updates.parquet").exists()


def test_what_a_killed_run_left_unfinished_goes(tmp_path, tiny, barely_trained):
    def write(part):
        left.append(part)
        raise KeyboardInterrupt

    left = []
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr("pathlib.Path.unlink", lambda *_, **__: None)
        write_atomically(tmp_path / "updates.parquet", write)
    assert left[0].exists()
    run(tiny("training.iterations=1"), tmp_path, barely_trained)
    assert not left[0].exists()


READ = [
    "warm_start.reading.max_steps=60",
    "warm_start.reading.measure_every=20",
    "warm_start.reading.batch_size=8",
]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["warm_start.max_steps=50", "warm_start.target_success=0.9"], "warm_start.max_steps=50"),
        (READ, r"reading accuracy 0\.\d+ after warm_start\.reading\.max_steps=60 is below"),
    ],
)
def test_warm_start_that_misses_its_target_says_so(tmp_path, tiny, overrides, said):
    with pytest.raises(ValueError, match=said):
        warm_start(load(tiny(*overrides)), tmp_path, progress=False)
    assert not (tmp_path / "warm_start.json").exists()


def test_reading_comes_first_and_ends_at_its_target(tmp_path, tiny):
    config = tiny(*READ, "warm_start.reading.target_accuracy=0.03", "warm_start.target_success=0")
    record = warm_start(load(config), tmp_path, progress=False)
    stages = [row["stage"] for row in record["history"]]
    assert stages == ["reading"] * (len(stages) - 1) + ["searching"]
    *before, last = [row["accuracy"] for row in record["history"][:-1]]
    assert last >= 0.03 > max(before, default=0) and record["history"][0]["loss"] > 2
    assert record["reading_steps"] == 20 * (len(stages) - 1) and record["steps"] == 50


def test_only_the_names_of_a_reading_example_are_learned(tiny):
    world = build(tiny()["world"], "world")
    (example,) = world.reading_examples(1, random.Random(0))
    tokens, mask = encode_episode(example, DialogueEncoder(world.environment.protocol, world.tokenizer))
    agent = [token for token, ours in zip(tokens, mask, strict=True) if ours]
    assert world.tokenizer.decode(agent) == " ".join(turn.text for turn in example.turns)
    others = [token for token, ours in zip(tokens, mask, strict=True) if not ours]
    shown = [example.prompt, *(turn.observation or "" for turn in example.turns)]
    assert world.tokenizer.decode(others) == " ".join(shown).strip()


def test_a_folder_keeps_the_warm_start_that_runs_stand_on(tmp_path, tiny, barely_trained):
    shutil.copytree(barely_trained, tmp_path / "start")
    with pytest.raises(ValueError, match="holds a warm start for another world or policy"):
        warm_start(load(tiny("world.seed=5")), tmp_path / "start", progress=False)
    assert load_warm_start(tmp_path / "start")[2] == load_warm_start(barely_trained)[2]


def test_trainer_leaves_the_reference_policy_alone(tmp_path, tiny, barely_trained):
    its_run = Run(load(tiny("training.iterations=1")), tmp_path, barely_trained, progress=False)
    trainer = its_run.trainer
    before = [p.clone() for p in trainer.reference.parameters()]
    its_run.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.reference.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, trainer.policy.parameters(), strict=True))


def test_one_folder_takes_one_run_at_a_time(tmp_path, tiny, barely_trained):
    """A second writer is refused before it touches anything; the first goes on undisturbed."""

    def intrude(trainer):
        with pytest.raises(FolderInUse, match="is in use by process"):
            run(tiny("algorithm=token_ppo"), tmp_path, barely_trained, resume="set_aside")

    its_run = Run(load(tiny()), tmp_path, barely_trained, on_iteration=intrude, progress=False)
    assert its_run.train()["status"] == "completed"
    assert json.loads((tmp_path / "run.json").read_text())["algorithm"] == "st_ppo"
    assert not list(tmp_path.glob("earlier-*"))
