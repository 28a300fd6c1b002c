"""The command line: help, one-line errors, playing, training and going on after an interruption."""

import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from typer.testing import CliRunner

from stppo import cli, waiting
from stppo.config.composition import compose
from stppo.config.identity import warm_start_dir
from tests.conftest import TINY, assert_one_line_error

# ---- help ---------------------------------------------------------------------------------------


COMMANDS = ["train", "warm-start", "play", "evaluate", "tiny-model", "collect", "compare", "claims", "report"]
COMMANDS += ["progress", "show", "list", "plugins check", "plugins verl-data"]
COMMANDS += ["retriever index", "retriever serve", "retriever query"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command):
    shown = CliRunner().invoke(cli.app, [*command.split(), "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0
    after = shown.output.split("Example", 1)
    assert len(after) == 2 and f"stppo {command} " in after[1]


# ---- errors -------------------------------------------------------------------------------------


def test_debug_shows_the_traceback_too(stppo):
    code, _, err = stppo("--debug", "train", "algorithm=ppo")
    assert code == 1 and "Traceback" in err and "ConfigError" in err
    assert err.splitlines()[-1].startswith("error: algorithm=ppo")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OSError(errno.EROFS, "Read-only file system", "there/x"), "there/x: Read-only file system; choose another place"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; make room"),
        (FileExistsError(errno.EEXIST, "File exists", "x"), "x: File exists; a file is in the way"),
        (OSError(errno.EIO, "Input/output error", "x"), "x: Input/output error\n"),
        (OSError("in words"), "in words\n"),
    ],
)  # fmt: skip
def test_an_error_of_the_system_says_where_and_what_to_do(stppo, monkeypatch, error, shown):
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    code, _, err = stppo("play")
    assert code == 1 and err.startswith(f"error: {shown}")


def test_a_missing_extra_is_named_before_a_warm_start_is_made(stppo, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.delitem(sys.modules, "stppo.policy.lora", raising=False)
    monkeypatch.setattr(cli, "train_one", lambda *_: pytest.fail("began"))
    code, _, err = stppo("train", "preset=smoke", "policy.lora={rank: 4}")
    assert code == 1 and "error: policy.lora needs peft: pip install" in err


@pytest.mark.parametrize("kind", [KeyError, RecursionError, NotImplementedError])
def test_an_error_that_nobody_foresaw_leaves_a_report(stppo, monkeypatch, tmp_path, kind):
    def broken(*_):
        raise kind("surprise")

    monkeypatch.setattr(cli, "train_one", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = stppo("train", *TINY)
    (file,) = tmp_path.glob("stppo-error-*.txt")
    assert_one_line_error(result, f"unexpected {kind.__name__}: {kind('surprise')}", str(file))
    text = file.read_text()
    assert text.startswith("stppo train preset=smoke") and "in broken" in text and "python" in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "preset=desktop"], ["preset=desktop", "laptop, ", "smoke"]),
        (["train", "algorithm=ppo"], ["algorithm=ppo", "token_ppo", "gspo"]),
        (["train", "algorithm=st_pp"], ["did you mean st_ppo?"]),
        (["train", "training.epoch=3"], ["did you mean epochs?"]),
        (["train", "trainin.epochs=3"], ["did you mean training?"]),
        (["train", "device=cuda"], ["did you mean training.device?"]),
        (["train", "lr=0.1"], ["did you mean training.learning_rate or warm_start."]),
        (["train", "algorithm.epsilon=0.3"], ["did you mean algorithm.objective.clip.epsilon_low?"]),
        (["train", "algorithm.objective.clip.epsilon_low=0"], ["epsilon_low=0"]),
        (["train", "seed=0,1", "--out", "x"], ["--out", "2 runs"]),
        (["train", "--resume", "maybe"], ["--resume maybe", "set_aside"]),
        (["train", "seed=0", "training.epochs=2,0"], ["training.epochs = 0"]),
        (["warm-start", "world=benchmark"], ["world.records=FILE"]),
        (["play", "world=benchmark"], ["world.records=FILE"]),
        (["play", "world=benchmark", "world.records=none.jsonl", "world.corpus=none.jsonl"], ["none.jsonl"]),
        (["collect", "metrics", "runs/none"], ["runs/none/run.json is missing"]),
        (["compare", "none"], ["none holds no run.json"]),
        (["plan", "--config-dir", "none"], ["none", "--config-dir", "No such file"]),
        (["plan", "smoke"], ["preset=smoke"]),
        (["train", "--preset", "smoke"], ["--preset", "preset=..."]),
        (["train", "--algorithm=st_ppo"], ["--algorithm=st_ppo: ", " algorithm=st_ppo"]),
        (["plan", "preset=smoke", "preset=laptop"], ["preset=smoke preset=laptop", "one preset"]),
        (["plan", "pipeline.regimes.OFF_POLICY.seeds=[]"], ["preset=laptop plans no run", "no seeds"]),
        (["train-planned", "pipeline.regimes.OFF_POLICY.seeds=[]"], ["preset=laptop plans no run"]),
        (["train-planned", "preset=smoke", "preset=laptop"], ["one preset"]),
        (
            ["train-planned", "preset=smoke", "--only", "no_such"],
            ["--only no_such", "stppo plan preset=smoke"],
        ),
        (["train-planned", "preset=smoke", "--only", "(grpo"], ["--only (grpo", "unterminated"]),
        (["bench", "token_ppo", "--rerun", "2"], ["token_ppo --rerun 2", "leave the method out"]),
        (["claims", "none", "out"], ["none/runs.json is missing"]),
        (["train", "preset=smoke", "--out", ""], ["an argument is empty"]),
        (["train", "preset=smoke", "--out="], ["an argument is empty"]),
        (["report", "results/none"], ["results/none/metrics/runs.json is missing", "snakemake"]),
    ],
)
def test_bad_input_is_one_line(stppo, tmp_path, arguments, parts):
    assert_one_line_error(stppo(*arguments), *parts)
    assert not list(tmp_path.iterdir()), "nothing was started"


# ---- play ---------------------------------------------------------------------------------------


def summary_of(result):
    code, out, err = result
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def test_play_prints_one_json_line_last(stppo):
    summary = summary_of(stppo("play", "world=synthetic", "--questions", "20"))
    assert list(summary) == ["n", "em", "f1", "recall_at_3", "searches_per_question"]
    assert summary["n"] == 20 and summary["em"] >= 0.7 and summary["searches_per_question"] >= 1


def test_play_shows_what_was_said_first(stppo):
    code, out, _ = stppo("play", "preset=smoke", "--questions", "3")
    assert code == 0 and out.count("\n  answer ") == 2 and out.count("question ") == 2
    assert "\n  agent  <search> " in out and "\n  world  <information> " in out
    _, alone, _ = stppo("play", "preset=smoke", "--questions", "3", "--transcripts", "0")
    assert alone == out.splitlines(keepends=True)[-1], "the summary is the same"


def test_show_writes_a_page_of_a_runs_trajectories(stppo, tmp_path):
    assert_one_line_error(stppo("show", "."), "trajectories.json: no such file")
    record = {"question": "q", "answers": ["a"], "answer": "a", "reward": 1.0, "tokens": ["mentor", "of"]}
    record |= {"agent_mask": [False, True], "turn_ids": [-1, 0], "logprobs": [0.0, -0.5]}
    (tmp_path / "trajectories.json").write_text(json.dumps([record]))
    code, out, _ = stppo("show", ".")
    assert code == 0 and "mentor" in (tmp_path / out.strip()).read_text(encoding="utf-8")


def test_what_can_be_chosen_is_listed(stppo):
    code, out, _ = stppo("list", "algorithms")
    assert code == 0 and re.search(r"^st_ppo +ST-PPO", out, re.M)
    assert re.search(r"^smoke +\w", stppo("list", "presets")[1], re.M)
    assert stppo("list")[1].splitlines()[0] == "stppo list algorithms"
    assert_one_line_error(stppo("list", "world_s"), "allowed are algorithms", "did you mean worlds?")


def test_a_base_that_is_no_algorithm_is_named(stppo, tmp_path):
    file = tmp_path / "algorithm" / "mine.yaml"
    file.parent.mkdir()
    file.write_text("defaults: [turn_pppo]\nname: mine\n")
    result = stppo("train", "algorithm=mine", "preset=smoke", "--config-dir", str(tmp_path))
    assert_one_line_error(result, "algorithm/mine", "turn_pppo", "did you mean turn_ppo?")


def test_ctrl_c_in_a_warm_start_says_that_it_begins_anew(stppo, monkeypatch):
    def interrupted(loaded):
        raise KeyboardInterrupt

    monkeypatch.setattr("stppo.training.warm_start.ensure_warm_start", interrupted)
    code, _, err = stppo("train", "preset=smoke")
    assert code == 130 and "a warm start from its beginning" in err


# ---- train --------------------------------------------------------------------------------------


@pytest.fixture
def started(tmp_path, monkeypatch, barely_trained):
    """A working folder whose cache holds the tiny warm start."""
    monkeypatch.chdir(tmp_path)
    start = tmp_path / warm_start_dir(compose(TINY))
    shutil.copytree(barely_trained, start)
    return tmp_path


END = r"\d\.\d\d \[\d\.\d\d, \d\.\d\d\]"
SUCCESS = rf"^success on 16 unseen questions.*: sampled {END} to {END}, greedy {END} to {END}; the warm start on 1 samples: 0.00$"


def runs_in(folder):
    return sorted(path.parent for path in folder.glob("results/smoke/manual/OFF_POLICY/*/*/run.json"))


def test_train_uses_the_cached_warm_start_and_really_trains(stppo, started):
    code, out, err = stppo("train", *TINY, "training.iterations=2", "algorithm=token_ppo,grpo")
    assert code == 0, err
    assert out.count("completed: 2 iterations, 8 updates") == 2
    assert len(re.findall(SUCCESS, out, re.M)) == 2 and re.search(SUCCESS, out.splitlines()[-1])
    assert [run.parent.name for run in runs_in(started)] == ["grpo", "token_ppo"]
    for run in runs_in(started):
        updates = pd.read_parquet(run / "updates.parquet")
        assert len(updates) == 8 and (updates["update_norm"] > 0).any()


def test_memory_that_may_run_out_is_one_warning_and_no_hindrance(stppo, started, monkeypatch, caplog):
    def warnings(free):
        caplog.clear()
        monkeypatch.setattr("stppo.preflight.check.host_memory", lambda *_: free)
        code, out, err = stppo("train", *TINY, "training.iterations=1", "training.learning_rate=1e-4,2e-4")
        assert code == 0, err
        return [line for line in caplog.messages if "memory" in line]

    assert warnings(2.0**40) == []
    (line,) = warnings(2.0**29)  # one for both runs of the sweep
    assert "0.5 GiB are free" in line and line.endswith("more by `stppo preflight`")
    caplog.clear()
    assert_last_line(stppo("train", *TINY, "policy.pretrained=/no/such/model"), "no such folder")
    assert "memory" not in caplog.text, "the error says it"
    monkeypatch.setattr("stppo.preflight.check.estimate", lambda *_, **__: 1 / 0)
    assert warnings(2.0**29) == ["memory was not estimated (ZeroDivisionError: division by zero)"]


@pytest.mark.slow
def test_members_of_a_sweep_are_named_by_what_differs_and_can_be_compared(stppo, started):
    sweep = ["seed=0,1", "training.critic_epochs=1,2", "warm_start_seed=0"]
    code, _, err = stppo("train", *TINY, "training.iterations=1", *sweep)
    assert code == 0, err
    assert "algorithm=st_ppo seed=1 training.critic_epochs=2" in err, "the progress bar"
    runs = runs_in(started)
    shown = [re.fullmatch(r"(seed\d-training\.critic_epochs=\d)-[0-9a-f]{12}", run.name)[1] for run in runs]
    assert shown == [f"seed{seed}-training.critic_epochs={epochs}" for seed in (0, 1) for epochs in (1, 2)]
    records = [json.loads((run / "run.json").read_text()) for run in runs]
    assert all("training.iterations=1" in record["variant"].split() for record in records)

    code, out, err = stppo("compare", "results/smoke/manual", "--csv", "table.csv")
    assert code == 0, err
    table = pd.read_csv("table.csv")
    assert (
        sorted(table["variant"]) == ["training.critic_epochs=1", "training.critic_epochs=2"]
        and "training.critic_epochs=2" in out
    )
    assert list(table["seeds"]) == [2, 2]
    assert stppo("collect", "metrics", *map(str, runs))[0] == 0
    assert set(pd.read_csv("metrics/summary.csv")["variant"]) == {
        "training.critic_epochs=1",
        "training.critic_epochs=2",
    }


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_interrupted_run_says_how_to_go_on_and_does(stppo, started, sent):
    arguments = ["train", *TINY, "training.iterations=12", "training.checkpoint_every=1", "--out", "run"]
    # A shell's background job, as these tests may be, starts with SIGINT ignored.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    child = subprocess.Popen(
        [sys.executable, "-c", heed + "from stppo.cli import main; main()", *arguments],
        cwd=started,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not list((started / "run" / "checkpoint").glob("[0-9]*")):
        assert child.poll() is None, child.stderr.read()
        assert time.monotonic() < deadline, "no checkpoint appeared"
        time.sleep(0.02)
    child.send_signal(sent)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert err.splitlines()[-1].startswith("stopped; the same command goes on")
    assert "Traceback" not in err
    kept = pd.read_parquet(started / "run" / "updates.parquet")
    assert 0 < len(kept) < 12 * 4

    code, out, err = stppo(*arguments)
    assert code == 0 and "completed: 12 iterations, 48 updates" in out
    updates = pd.read_parquet(started / "run" / "updates.parquet")
    assert list(updates["update"]) == list(range(1, 49))
    seconds = updates["seconds_update"][: len(kept)]
    assert list(seconds) == list(kept["seconds_update"]), "what was trained before is not trained again"


def assert_last_line(result, part):
    code, _, err = result
    assert code == 1 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ") and part in err.splitlines()[-1]


def test_runs_below_a_folder_are_collected(stppo, started):
    assert stppo("train", *TINY, "training.iterations=1", "--out", "below/one")[0] == 0
    code, out, err = stppo("collect", "metrics", "below")
    assert code == 0 and "st_ppo" in out, err
    assert len(json.loads((started / "metrics" / "runs.json").read_text())) == 1


def test_a_checkpoint_of_other_settings_names_them(stppo, started):
    arguments = ["train", *TINY, "training.iterations=1", "--out", "run"]
    assert stppo(*arguments)[0] == 0
    result = stppo(*arguments, "algorithm.objective.clip.epsilon_low=0.125", "training.kernels=eager")
    assert_last_line(result, "(algorithm.objective.clip.epsilon_low = 0.2 there, 0.125 here)")
    (started / "run/config.yaml").write_text("algorithm: {name: st_ppo}\n")
    assert_last_line(stppo(*arguments, "training.learning_rate=0.01"), "(another config or code)")


def test_an_error_in_a_class_of_ones_own_names_its_line(stppo, started):
    (started / "mine" / "algorithm").mkdir(parents=True)
    (started / "mine" / "algorithm" / "mine.yaml").write_text(
        "defaults: [turn_ppo]\nname: mine\nobjective: {ratio: {_target_: own_failing_ratio.Mine}}\n"
    )
    file = started / "mine" / "own_failing_ratio.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom stppo.objectives import Ratio\n\n\n"
        "@dataclass(frozen=True)\nclass Mine(Ratio):\n"
        "    def __call__(self, *given):\n        return {}['no such key']\n"
    )
    result = stppo("train", *TINY, "algorithm=mine", "training.iterations=1", "--config-dir", "mine")
    assert_last_line(result, f"{file}, line 8: KeyError: 'no such key'")


# ---- what takes long -------------------------------------------------------------------------------


def test_only_what_takes_long_is_said(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "SECONDS", 0.05)
    caplog.set_level(logging.INFO)
    with waiting.saying("reading the questions"):
        time.sleep(0.3)
    with waiting.saying("a moment"):
        pass
    with pytest.raises(KeyError), waiting.saying("what fails at once"):
        raise KeyError
    time.sleep(0.2)
    assert [record.message for record in caplog.records] == ["reading the questions ..."]
