"""`stppo train-planned`: what a record holds is not trained again, and what is left begins where the record began."""

import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from stppo import cli
from stppo.config.composition import compose
from stppo.config.files import VARIABLE
from stppo.config.planned import planned_runs
from stppo.record.ownership import PARENT
from stppo.training import campaign, processes
from stppo.training.warm_start import made_for, recorded_start
from tests.conftest import TINY

PRESET = """# @package _global_
defaults:
  - override /world: synthetic_small
preset: mini
warm_start: {target_success: 0.0, max_steps: 20, evaluate_every: 20, evaluate_questions: 16, final_samples: 16, demonstrations: 64, reading: {max_steps: 0}}
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
    name, older = start.name, start.with_name("seed0-made-by-older-code")
    start.rename(older)
    (older / "mark").touch()
    assert "1 of 2 runs are in record/metrics" in command(*train)
    assert [folder.name for folder in runs.iterdir()] == ["so_grpo"]
    assert (Path("results/mini/warm_start") / name / "mark").is_file()
    again = json.loads((runs / "so_grpo/seed0/run.json").read_text())
    assert again["warm_start"] == made_here["so_grpo"]["warm_start"]

    assert "2 of 2" not in command(*train, "--again")
    assert sorted(folder.name for folder in runs.iterdir()) == ["grpo", "so_grpo"]


def test_with_vllm_each_job_has_a_process_of_its_own(tmp_path, tiny, monkeypatch):
    asked = []

    def apart(function, *arguments):
        asked.append((function, *arguments))
        return {"success_sampled": 0.1, "success_greedy": 0.2} if "warm_start:" in function else "completed"

    monkeypatch.setattr(processes, "in_own_process", apart)
    monkeypatch.setattr(campaign, "warm_start_dir", lambda _: tmp_path)
    config, places = tiny("rollout=vllm"), (tmp_path / "run", tmp_path / "start")
    assert campaign._start(config).text == "sampled 0.10, greedy 0.20"
    assert campaign._train("name", config, *places).text == "completed"
    assert asked == [
        ("stppo.training.warm_start:warm_start", config, tmp_path, False, False),
        ("stppo.training.campaign:train_run", config, *places),
    ]


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
    monkeypatch.setattr(campaign.os, "cpu_count", lambda: 6)
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
    ],
)
def test_a_recorded_start_fits_what_it_was_made_with_alone(tmp_path, monkeypatch, changed, fits):
    monkeypatch.chdir(tmp_path)
    recorded = ["preset=smoke", "warm_start_seed=0", "+pipeline.recorded=record"]
    folder = tmp_path / "record/warm_start/seed0-abc"
    folder.mkdir(parents=True)
    record = {"success_sampled": 0.2, "success_greedy": 0.4, "n_sampled": 300}
    record["made_for"] = made_for(compose(recorded))
    (folder / "warm_start.json").write_text(json.dumps(record))
    found = recorded_start(compose([*recorded, changed]))
    assert (found is not None and found.name == "seed0-abc") is fits


def starts(config):
    number = config["warm_start_seed"]
    return campaign.Done(f"start {number}", 0.0, "", "no corpus" if number == BAD_WORLD else None)


def trains(name, config, folder, start):
    if name == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    return campaign.Done(name, 0.0, "completed")


BAD_WORLD, KILLED = 1, "OFF_POLICY/token_ppo/seed0"


class Breaking(ThreadPoolExecutor):
    """A pool that takes some jobs before it breaks."""

    def __init__(self, takes):
        super().__init__(2)
        self.left = takes

    def submit(self, *job):
        if self.left == 0:
            raise BrokenProcessPool
        self.left -= 1
        return super().submit(*job)


def test_a_pool_that_breaks_between_two_jobs_is_replaced(monkeypatch):
    """As where a process is killed that had nothing to do, or while the end of another's job is reported."""
    pools = [Breaking(0), Breaking(2), Breaking(100)]
    monkeypatch.setattr(campaign, "_pool", lambda jobs: pools.pop(0))
    monkeypatch.setattr(campaign, "_start", lambda config: campaign.Done("start", 0.0, ""))
    monkeypatch.setattr(campaign, "_train", lambda name, *_: campaign.Done(name, 0.0, "completed"))
    runs = planned_runs("laptop", ["pipeline.regimes.OFF_POLICY.algorithms=[token_ppo,st_ppo]"])
    told = []
    assert campaign.train_planned("laptop", runs, 2, lambda done, *_: told.append(done.name)) == []
    assert sorted(told) == sorted([run.name for run in runs] + ["start"] * 3) and not pools


def test_a_killed_process_and_a_failed_start_end_their_runs_alone(monkeypatch, caplog):
    """jobs=1: nothing runs beside the killed one. Told of every run, whatever became of it."""
    monkeypatch.setattr("stppo.waiting.SECONDS", 0.0)
    caplog.set_level("INFO")
    monkeypatch.setattr(campaign, "_start", starts)
    monkeypatch.setattr(campaign, "_train", trains)
    chosen = ["pipeline.regimes.OFF_POLICY.algorithms=[token_ppo,st_ppo]"]
    runs = [run for run in planned_runs("laptop", chosen) if run.regime == "OFF_POLICY"]
    assert len(runs) == 6
    told = []
    failed = campaign.train_planned("laptop", runs, 1, lambda done, n, total: told.append((done, n, total)))
    assert "composing the 6 runs of preset=laptop ..." in caplog.messages
    assert [n for _, n, _ in told] == list(range(1, 6 + 3 + 1)) and {total for *_, total in told} == {9}
    errors = {done.name: done.error for done in failed}
    assert errors.pop(KILLED).startswith("its process was killed")
    assert errors.pop(f"start {BAD_WORLD}") == "no corpus"
    assert {name.rpartition("/")[2] for name in errors} == {"seed1"} and len(errors) == 2
    assert set(errors.values()) == {"its warm start failed: no corpus"}
    completed = {done.name for done, *_ in told if done.text == "completed"}
    assert completed == {run.name for run in runs} - {KILLED, *errors}


def test_a_worker_takes_no_further_job_when_the_campaign_is_gone():
    announce = "import os\nfrom stppo.record.ownership import PARENT, announce_parent\nannounce_parent()\nprint(os.environ[PARENT])"
    gone = subprocess.run([sys.executable, "-c", announce], capture_output=True, text=True, check=True)
    job = "from stppo.training.campaign import _between_jobs\n_between_jobs()\nprint('went on')"
    told = {
        name: subprocess.run(
            [sys.executable, "-c", job],
            env=os.environ | {PARENT: parent},
            capture_output=True,
            text=True,
        )
        for name, parent in (("gone", gone.stdout.strip()), ("none", ""))
    }
    assert (told["gone"].returncode, told["gone"].stdout) == (1, "")
    assert told["none"].stdout.strip() == "went on"


def test_an_error_in_a_rule_of_ones_own_names_its_line(tmp_path):
    rule = tmp_path / "my_rules.py"
    rule.write_text("def terms():\n    return {}['ratios']\n")
    code = compile(rule.read_text(), str(rule), "exec")
    space = {}
    exec(code, space)
    with pytest.raises(KeyError) as caught:
        space["terms"]()
    assert campaign._line(caught.value).startswith("KeyError: 'ratios'")
    assert f"({rule}, line 2)" in campaign._line(caught.value)
