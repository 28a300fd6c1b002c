"""`stppo train-planned`: what a record holds is left out, what fails ends alone, an interruption in order."""

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import SoftFileLease
from typer.testing import CliRunner

from stppo import cli
from stppo.config.composition import compose
from stppo.config.files import VARIABLE
from stppo.config.planned import planned_runs
from stppo.record.ownership import LOCK_FILE
from stppo.training import campaign
from stppo.training.warm_start import load_warm_start, made_for, recorded_start
from tests.conftest import TINY

PRESET = """# @package _global_
defaults:
  - override /world: synthetic_small
preset: mini
warm_start: {target_success: 0.0, max_steps: 20, evaluate_every: 20, evaluate_questions: 16,
  final_samples: 16, demonstrations: 64, reading: {max_steps: 0}}
pipeline:
  recorded: record
  regimes:
    OFF_POLICY: {training: off_policy, algorithms: [grpo, so_grpo], seeds: [0]}
"""


@pytest.mark.slow
def test_recorded_runs_are_left_out_and_their_warm_start_is_taken(tmp_path, monkeypatch):
    (tmp_path / "own/preset").mkdir(parents=True)
    (tmp_path / "own/preset/mini.yaml").write_text(PRESET)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> str:
        done = CliRunner().invoke(cli.app, list(arguments))
        assert done.exit_code == 0, done.output
        return done.output

    small = [override for override in TINY[1:] if not override.startswith("warm_start.")]
    train = ("train-planned", "preset=mini", *small, "--jobs", "1")
    assert "runs are in" not in command(*train), "there is no record yet"
    runs = Path("results/mini/runs/OFF_POLICY")
    made_here = {
        name: json.loads((runs / name / "seed0/run.json").read_text()) for name in ("grpo", "so_grpo")
    }
    assert {record["status"] for record in made_here.values()} == {"completed"}

    command("collect", "record/metrics", str(runs / "grpo/seed0"))
    shutil.move("results/mini/warm_start", "record/warm_start")
    shutil.rmtree("results")
    (start,) = Path("record/warm_start").iterdir()
    name = start.name
    (start / "mark").touch()
    shutil.make_archive(str(start.with_name("seed0-made-by-older-code")), "zip", start)
    shutil.rmtree(start)
    assert "1 of 2 runs are in record/metrics" in command(*train)
    assert [folder.name for folder in runs.iterdir()] == ["so_grpo"]
    assert (Path("results/mini/warm_start") / name / "mark").is_file()
    again = json.loads((runs / "so_grpo/seed0/run.json").read_text())
    assert again["warm_start"] == made_here["so_grpo"]["warm_start"]

    assert "2 of 2" not in command(*train, "--again")
    assert sorted(folder.name for folder in runs.iterdir()) == ["grpo", "so_grpo"]


@pytest.mark.parametrize(
    ("override", "gpu", "jobs"),
    [
        ("training.device=cuda", True, 1),
        ("training.device=auto", True, 1),
        ("rollout=vllm", True, 1),
        ("seed=0", True, 6),
        ("training.device=auto", False, 6),
    ],
)
def test_by_default_one_run_at_a_time_on_a_gpu(tiny, monkeypatch, override, gpu, jobs):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(campaign, "usable_cores", lambda: 6)
    runs = [SimpleNamespace(config=tiny()), SimpleNamespace(config=tiny(override))]
    assert campaign.runs_at_a_time(runs) == jobs


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ("training.epochs=7", True),
        ("warm_start.target_success=0.11", False),
        ("warm_start.noise.malformed=0.3", False),
        ("world.n_train=100", False),
        ("policy.hidden_size=32", False),
        ("warm_start_seed=5", False),
        ("world=multiple_choice", False),
    ],
)
def test_a_recorded_start_fits_what_it_was_made_with_alone(tmp_path, monkeypatch, changed, fits):
    monkeypatch.chdir(tmp_path)
    recorded = ["preset=smoke", "warm_start_seed=0", "+pipeline.recorded=record"]
    folder = tmp_path / "record/warm_start"
    folder.mkdir(parents=True)
    record = {"success_sampled": 0.2, "success_greedy": 0.4, "n_sampled": 300}
    record["made_for"] = made_for(compose(recorded))
    with zipfile.ZipFile(folder / "seed0-abc.zip", "w") as archive:
        archive.writestr("warm_start.json", json.dumps(record))
    found = recorded_start(compose([*recorded, changed]))
    assert (found is not None and found.name == "seed0-abc.zip") is fits


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ("seed2", ["token_ppo/seed2", "st_ppo/seed2"]),
        ("/(token|turn)_ppo/", ["token_ppo/seed0", "token_ppo/seed1", "token_ppo/seed2"]),
        ("/st_ppo/seed[01]$", ["st_ppo/seed0", "st_ppo/seed1"]),
    ],
)
def test_some_of_the_planned_runs_are_chosen_by_name(monkeypatch, only, chosen):
    told = []
    monkeypatch.setattr(campaign, "train_planned", lambda preset, runs, *_: told.extend(runs) or [])
    algorithms = "pipeline.regimes.OFF_POLICY.algorithms=[token_ppo,st_ppo]"
    done = CliRunner().invoke(cli.app, ["train-planned", "preset=laptop", algorithms, "--only", only])
    assert done.exit_code == 0, done.output
    assert sorted(run.name for run in told) == sorted(f"OFF_POLICY/{name}" for name in chosen)


@pytest.mark.parametrize("regime", ["PAPER", "CHAINS", "GUESS", "NOISY"])
def test_every_setting_of_the_divisors_trial_begins_from_the_starts_that_are_kept(regime):
    """Also those whose world warm-starts to another success."""
    runs = [
        run for run in planned_runs("divisor", []) if run.regime == regime and run.seed in (401, 431, 441)
    ]
    assert runs
    for run in runs:
        kept = recorded_start(run.config)
        assert kept is not None and kept.name.startswith(f"seed{run.seed}-")
    assert (
        recorded_start(
            compose(["preset=divisor", "seed=441", "world=multiple_choice", "warm_start.target_success=0.3"])
        )
        is None
    )


REFERENCE = Path(__file__).parents[1] / "results/reference"
DIVISOR = REFERENCE / "divisor/part2"


KEPT = [file for part in (DIVISOR, REFERENCE / "thousand") for file in sorted(part.glob("warm_start/*.zip"))]


@pytest.mark.parametrize("kept", KEPT, ids=lambda file: file.stem)
def test_a_kept_start_is_the_one_that_its_recorded_runs_began_from(kept, tmp_path):
    recorded = json.loads((kept.parents[1] / "metrics/runs.json").read_text())
    runs = [run for run in recorded if run["warm_start_folder"] == kept.stem]
    zipfile.ZipFile(kept).extractall(tmp_path)
    _, record, weights = load_warm_start(tmp_path)
    assert runs and {run["warm_start_weights"] for run in runs} == {weights}
    assert {run["warm_start"]["success_sampled"] for run in runs} == {record["success_sampled"]}


def test_every_world_of_the_divisors_trial_has_its_start_kept():
    """But for 401 to 406, which were recorded before starts were kept."""
    recorded = json.loads((DIVISOR / "metrics/runs.json").read_text())
    kept = {file.stem for file in DIVISOR.rglob("seed*.zip")}
    assert {run["warm_start_folder"] for run in recorded if run["seed"] not in range(401, 407)} <= kept


BAD_WORLD, KILLED = 1, "OFF_POLICY/token_ppo/seed0"


class MadeUp:
    """A fork that does nothing: one warm start fails, one run is killed."""

    def __init__(self, argv, env, streams):
        config, *folders = json.loads(argv[1])
        killed = len(folders) == 2 and folders[0].endswith(KILLED)
        bad = len(folders) == 1 and config["warm_start_seed"] == BAD_WORLD
        self.status = -signal.SIGKILL if killed else int(bad)
        os.write(streams[1], b"it begins\nno corpus\n" if bad else b"completed\n")

    def wait(self):
        return self.status


def test_a_killed_process_and_a_failed_start_end_their_runs_alone(monkeypatch, caplog):
    """Told of every run, whatever became of it."""
    monkeypatch.setattr("stppo.waiting.SECONDS", 0.0)
    caplog.set_level("INFO")
    monkeypatch.setattr(campaign, "serving", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(campaign, "Fork", MadeUp)
    chosen = ["pipeline.regimes.OFF_POLICY.algorithms=[token_ppo,st_ppo]"]
    runs = [run for run in planned_runs("laptop", chosen) if run.regime == "OFF_POLICY"]
    assert len(runs) == 6
    told = []
    failed = campaign.train_planned("laptop", runs, 2, lambda done, n, total: told.append((done, n, total)))
    assert "composing the 6 runs of preset=laptop ..." in caplog.messages
    assert [n for _, n, _ in told] == list(range(1, 6 + 3 + 1)) and {total for *_, total in told} == {9}
    errors = {done.name: done.error for done in failed}
    assert errors.pop(KILLED).startswith("its process was killed")
    (start,) = [name for name in errors if name.startswith("warm start")]
    assert errors.pop(start) == "no corpus" and len(errors) == 2
    assert {name.rpartition("/")[2] for name in errors} == {"seed1"}
    assert set(errors.values()) == {"its warm start failed: no corpus"}
    completed = {done.name for done, *_ in told if done.text == "completed" and "/" in done.name}
    assert completed == {run.name for run in runs} - {KILLED, *errors}
    monkeypatch.setattr(campaign, "train_planned", lambda *_: failed)
    said = CliRunner().invoke(cli.app, ["train-planned", "preset=laptop", *chosen, "--only", "OFF_POLICY"])
    assert str(said.exception).startswith("3 of 6 runs failed, first ")


class Endless:
    """A fork that runs until it is terminated."""

    def __init__(self, argv, env, streams):
        self.ended = threading.Event()

    def wait(self):
        assert self.ended.wait(60)
        return -signal.SIGTERM

    def terminate(self):
        self.ended.set()


def test_an_interruption_right_after_a_job_was_submitted_ends_it_too(monkeypatch):
    class Interrupted(campaign.ThreadPoolExecutor):
        def submit(self, *job):
            super().submit(*job)
            raise KeyboardInterrupt

    monkeypatch.setattr(campaign, "serving", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(campaign, "Fork", Endless)
    monkeypatch.setattr(campaign, "ThreadPoolExecutor", Interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        campaign.train_planned("laptop", planned_runs("laptop", [])[:1], 1, lambda *_: None)
    assert time.monotonic() - began < 30


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_campaign_ends_its_runs_and_goes_on(tmp_path, sent):
    small = [override for override in TINY if not override.startswith("training.iterations")]
    regimes = "pipeline.regimes={OFF_POLICY: {algorithms: [grpo, so_grpo], seeds: [0]}}"
    command = ["train-planned", *small, regimes, "--jobs", "2"]
    # Where the tests run in a script's background, SIGINT is ignored, and children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = f"{heard}from stppo.cli import main; main()"
    begin = [sys.executable, "-c", code, *command, "training.iterations=4000"]
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    first = subprocess.Popen(begin, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    runs, deadline = tmp_path / "results/smoke/runs/OFF_POLICY", time.monotonic() + 300
    while not all((runs / name / "seed0/checkpoint").exists() for name in ("grpo", "so_grpo")):
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    first.send_signal(sent)
    assert "the same command goes on" in first.communicate(timeout=60)[1] and first.returncode == 130
    pids = [SoftFileLease(runs / name / "seed0" / LOCK_FILE).pid for name in ("grpo", "so_grpo")]
    assert not any(pid and Path(f"/proc/{pid}").exists() for pid in pids)


def test_an_error_in_a_rule_of_ones_own_names_its_line(tmp_path, monkeypatch):
    (tmp_path / "algorithm").mkdir()
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    rule = tmp_path / "my_rules.py"
    rule.write_text("def terms():\n    return {}['ratios']\n")
    space = {}
    exec(compile(rule.read_text(), str(rule), "exec"), space)
    monkeypatch.setattr(campaign, "train_run", lambda *_: space["terms"]())
    monkeypatch.setattr(sys, "argv", ["stppo-job", json.dumps([{}, "run", "start"])])
    with pytest.raises(SystemExit) as ended:
        campaign.job()
    assert ended.value.code.startswith("KeyError: 'ratios'") and f"({rule}, line 2)" in ended.value.code


def test_a_job_finds_the_classes_of_ones_own_folder(tmp_path, monkeypatch, capsys):
    """Its process is a fork of one that knows of no such folder: only the variable names it."""
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "rules_of_one.py").write_text("NAME = 'found'\n")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(campaign, "make_start", lambda *_: importlib.import_module("rules_of_one").NAME)
    monkeypatch.setattr(sys, "argv", ["stppo-job", json.dumps([{}, "start"])])
    campaign.job()
    assert capsys.readouterr().out.strip() == "found"
