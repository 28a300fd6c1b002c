"""`preset=qwen` from end to end on a CPU, with a tiny random model in place of Qwen2.5: do all parts work together?

    python benchmarks/qwen_on_cpu.py --data DIR --out DIR        DIR of the data holds corpus.jsonl, hotpotqa/records.jsonl

Runs only what a user would type: `stppo tiny-model`, `retriever index|serve`, `preflight`, `warm-start`, `train`, `evaluate`.
Training is killed with SIGKILL after its first checkpoint, loses its retrieval server after the second, and goes on
each time by the same command. Roll-outs are vLLM's, questions and passages real, searches go through HTTP. A check that
fails ends it with one line and exit code 1; else DIR/summary.json and summary.md say what was measured.

It proves the path, not learning. Such a model cannot read, so it is started on a few questions until it knows some of
their answers by heart: else no trajectory would earn a reward, and the updates would be empty. `--record` keeps the summary in results/reference.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pandas as pd
import requests

from stppo.config.provenance import git_state, hardware, versions
from stppo.files import write_atomically, write_json
from stppo.record.schema import (
    BENCHMARKS_FILE,
    COMPLETED,
    ENGINE_COLUMNS,
    EVALUATIONS_FILE,
    RUN_FILE,
    UPDATES_FILE,
)

STPPO = Path(sys.executable).with_name("stppo")
SERVER_SECONDS, STAGE_SECONDS = 120, 3600
REFERENCE = Path(__file__).resolve().parents[1] / "results" / "reference"
MISMATCH_MEAN, MISMATCH_MAX = 1e-5, 1e-4  # nats; trainer and sampler both compute in float32
EPOCHS, MINIBATCHES = 1, 2  # the preset's


class Failed(SystemExit):
    """A check that failed."""

    def __init__(self, what: str) -> None:
        super().__init__(f"FAILED: {what}")


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Failed(what)


class Commands:
    """Runs `stppo` commands one after the other; each has its log in `out`/logs and its seconds in `seconds`."""

    def __init__(self, out: Path) -> None:
        self.out, self.logs, self.seconds = out, out / "logs", {}
        self.logs.mkdir(parents=True, exist_ok=True)
        (out / "results").mkdir(exist_ok=True)  # where there is one, it holds the cached warm starts

    def start(self, stage: str, *arguments: Any) -> subprocess.Popen:
        with self.log(stage).open("w") as log:
            return subprocess.Popen(
                [STPPO, *map(str, arguments)], cwd=self.out, stdout=log, stderr=subprocess.STDOUT
            )

    def run(self, stage: str, *arguments: Any) -> str:
        """Its output; Failed where it fails."""
        print(f"{stage} ...", flush=True)
        code = self.wait(stage, self.start(stage, *arguments))
        check(code == 0, f"{stage} ended with exit code {code}: {self.end_of(stage)}")
        return self.log(stage).read_text()

    def wait(
        self, stage: str, process: subprocess.Popen, until: Callable[[], bool] | None = None
    ) -> int | None:
        """Its exit code; None as soon as `until` holds. Failed where it runs for too long."""
        began = time.monotonic()
        try:
            while (code := process.poll()) is None and not (until and until()):
                check(
                    time.monotonic() - began < STAGE_SECONDS, f"{stage} runs for more than {STAGE_SECONDS} s"
                )
                time.sleep(0.2)
        except BaseException:
            process.kill()
            raise
        self.seconds[stage] = round(self.seconds.get(stage, 0) + time.monotonic() - began, 1)
        return code

    def log(self, stage: str) -> Path:
        return self.logs / f"{stage.replace(' ', '-')}.log"

    def end_of(self, stage: str) -> str:
        return " | ".join(self.log(stage).read_text().strip().splitlines()[-3:])[-600:]


class Server:
    """The retrieval server of an index, on this machine; stopped at the end of `with`."""

    def __init__(self, commands: Commands, index: Path) -> None:
        self.commands, self.index, self.process, self.starts = commands, index, None, 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.starts += 1
        stage = f"server {self.starts}"
        self.process = self.commands.start(stage, "retriever", "serve", self.index, "--port", self.port)
        until = time.monotonic() + SERVER_SECONDS
        while not self._answers():
            check(self.process.poll() is None, f"the server does not start: {self.commands.end_of(stage)}")
            check(time.monotonic() < until, f"the server does not answer within {SERVER_SECONDS} s")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return requests.get(f"http://127.0.0.1:{self.port}/health", timeout=5).ok
        except requests.RequestException:
            return False

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)
            self.process = None


def overrides_of(options: argparse.Namespace, port: int) -> list[str]:
    """preset=qwen with another model, local data, sizes for a CPU and, as the model is random, a supervised start."""
    return [
        "preset=qwen",
        f"policy.pretrained={options.out / 'model'}",
        "world.benchmark=hotpotqa",
        "world.train=hotpotqa",
        f"world.records={options.data / 'hotpotqa' / 'records.jsonl'}",
        "world.held_out=0.2",
        f"world.train_limit={options.train_records}",
        f"world.retriever.url=http://127.0.0.1:{port}/retrieve",
        "world.retriever.attempts=4",
        "world.retriever.longest_pause=2",
        "world.top_k=2",
        "world.turn_budget=3",
        "world.max_turn_tokens=48",
        "world.max_observation_tokens=128",
        "rollout.max_tokens=1152",
        f"rollout.max_num_seqs={options.trajectories}",
        "training.device=cpu",
        "training.precision=float32",
        "training.optimizer=adam",
        "training.micro_batch_tokens=8192",
        f"training.iterations={options.iterations}",
        f"training.trajectories_per_iteration={options.trajectories}",
        "training.learning_rate=1.0e-4",
        "training.checkpoint_every=2",
        f"warm_start.max_steps={options.warm_start_steps}",
        f"warm_start.evaluate_every={options.warm_start_steps}",
        "warm_start.target_success=0",
        f"warm_start.evaluate_questions={options.questions}",
        "warm_start.final_samples=32",
        "warm_start.demonstrations=256",
        "warm_start.batch_size=8",
        "warm_start.noise.early_answer=0.1",
        "warm_start.noise.wrong_entity=0.05",
        "warm_start.noise.malformed=0.02",
        f"evaluation.questions={options.questions}",
        f"evaluation.every={options.iterations // 2}",
        f"evaluation.greedy_every={options.iterations}",
    ]


def train_interrupted(commands: Commands, server: Server, command: list[Any], run: Path) -> dict[str, Any]:
    """Train to the end with the same command three times: killed, without server, undisturbed. What happened."""
    saved = run / "checkpoint"
    training = commands.start("train 1", *command)
    print("train 1 ...", flush=True)
    code = commands.wait("train 1", training, until=lambda: (saved / "1").is_dir())
    check(code is None, f"training ended before its first checkpoint: {commands.end_of('train 1')}")
    os.kill(training.pid, signal.SIGKILL)
    check(training.wait() == -signal.SIGKILL, "training was over before it could be killed")
    killed, before = datetime.now(UTC), pd.read_parquet(run / UPDATES_FILE)

    training = commands.start("train 2", *command)
    print("train 2 ...", flush=True)
    code = commands.wait("train 2", training, until=lambda: (saved / "2").is_dir())
    check(code is None, f"the killed run ended before its second checkpoint: {commands.end_of('train 2')}")
    server.stop()
    code = commands.wait("train 2", training)
    log = commands.log("train 2").read_text()
    told = log.strip().splitlines()[-1]
    check(code == 1, f"without its server the run ended with exit code {code}: {told}")
    check("attempt 2 of 4 follows" in log, f"the run did not ask its server again: {told}")
    check(
        "retrieval server" in told and "run the same command again to go on" in told, f"no remedy in: {told}"
    )
    at_stop = json.loads((run / RUN_FILE).read_text())

    server.start()
    commands.run("train 3", *command)
    after, record = pd.read_parquet(run / UPDATES_FILE), json.loads((run / RUN_FILE).read_text())
    check(record["status"] == COMPLETED, f"the run is {record['status']}")
    check(datetime.fromisoformat(record["started"]) < killed, "the killed run began again")
    # The checkpoint had these rows already: one that was lost or made twice would show.
    pd.testing.assert_frame_equal(after.head(len(before)), before, check_exact=True)
    return {
        "killed": {"updates_kept": len(before), "iteration": int(before["iteration"].max())},
        "without_server": {"iteration": at_stop["iterations"], "told": told},
        "wall_seconds_of_training": record["wall_seconds"],
    }


def check_tables(updates: pd.DataFrame, evaluations: pd.DataFrame, iterations: int) -> None:
    """Every row is there once, and trainer and sampler agreed throughout."""
    per_iteration = EPOCHS * MINIBATCHES
    check(
        list(updates["update"]) == [*range(1, iterations * per_iteration + 1)],
        "updates are missing or twice there",
    )
    check((updates.groupby("iteration").size() == per_iteration).all(), "an iteration lacks updates")
    asked = list(evaluations[["iteration", "temperature"]].itertuples(index=False, name=None))
    expected = [(0, 0.0), (0, 1.0), (iterations // 2, 1.0), (iterations, 0.0), (iterations, 1.0)]
    check(asked == expected, f"evaluations are {asked}, not {expected}")
    check(updates[[*ENGINE_COLUMNS]].notna().all(axis=None), "columns of the engine are empty")
    mean, largest = updates["mismatch_mean"].max(), updates["mismatch_max"].max()
    check(
        mean <= MISMATCH_MEAN and largest <= MISMATCH_MAX,
        f"log-probs differ by {mean:.2g}, at most {largest:.2g}",
    )
    first = updates.groupby("iteration")["ratio_max_token"].first().max()
    check(abs(first - 1) < 1e-4, f"a first update of an iteration has a ratio of {first}, not 1")
    sampled = evaluations[evaluations["temperature"] > 0]
    check(sampled["searches"].min() > 0, "the policy never searches: give it a longer warm start")
    rewarded = updates[updates["reward_train"] > 0]
    check(len(rewarded) > 0, "no training trajectory earned a reward: give it a longer warm start")
    check((rewarded["advantage_std"] > 0).any(), "rewards lead to no advantages")
    check(rewarded["update_norm"].min() > 0, "an update changed nothing")


def phases(updates: pd.DataFrame, trajectories: int) -> dict[str, dict[str, float]]:
    """Seconds and tokens/s of each phase: sampled agent tokens while sampling, whole trajectories elsewhere."""
    one = updates.groupby("iteration").first()
    sampled, all_tokens = one["tokens_rollout"].sum(), one["trajectory_tokens"].sum() * trajectories
    spent = {
        "sampling": (one["seconds_rollout"].sum() - one["seconds_sync"].sum(), sampled),
        "hand-over of weights": (one["seconds_sync"].sum(), None),
        "scoring": (one["seconds_scoring"].sum(), all_tokens),
        "critic": (one["seconds_critic"].sum(), all_tokens),
        "policy updates": (updates["seconds_update"].sum(), all_tokens * EPOCHS),
    }
    return {
        name: {"seconds": round(float(s), 1), "tokens_per_second": n and round(float(n / s))}
        for name, (s, n) in spent.items()
    }


def render(found: dict[str, Any]) -> str:
    """The summary as Markdown."""
    about, start = found["provenance"], found["warm_start"]
    rows = pd.DataFrame(found["evaluations"])
    rows["where"] = "validation, after iteration " + rows["iteration"].astype(str)
    rows["decoding"] = ["greedy" if t == 0 else "sampled" for t in rows["temperature"]]
    test = pd.DataFrame(found["test"]).rename(columns={"em": "success"})
    test["where"] = "test, `stppo evaluate`"
    columns = ["where", "decoding", "n_questions", "success", "f1", "valid_format_rate", "searches", "turns"]
    measured = pd.concat([rows, test])[columns].rename(columns={"success": "EM", "n_questions": "questions"})
    spent = pd.DataFrame(found["phases"], dtype=object).T.rename_axis("phase").reset_index()
    stages = pd.DataFrame(list(found["seconds"].items()), columns=["stage", "seconds"])
    killed, stopped, known = found["killed"], found["without_server"], found["success_train"]
    return f"""# `preset=qwen` from end to end on a CPU

A random model of Qwen2.5's shape ({found["model"]}) in place of Qwen2.5, real HotpotQA questions, a {found["index"]}
behind HTTP, roll-outs by vLLM. This proves that the parts work together, not that anything is learnt: such a model
answers no new question, before or after. Made by `python benchmarks/qwen_on_cpu.py`.

Commit {about["git_commit"]}{" with changes" if about["git_dirty"] else ""}, {about["date"]}; {about["hardware"]["cpu"]},
{about["hardware"]["cores"]} cores shared with other work, so times are upper bounds.

- Warm start: {start["steps"]} supervised steps, loss {start["history"][-1]["loss"]:.2f} per token at the end.
- SIGKILL after the checkpoint of iteration {killed["iteration"]}: the same command went on; its {killed["updates_kept"]} rows are kept bit for bit.
- Server stopped: the run asked again, ended with exit code 1 after iteration {stopped["iteration"]} and said what follows; with the
  server back, the same command finished it.
  > {stopped["told"]}
- Rewards: exact match on the training questions, few and learnt by heart in the warm start, is {known["first quarter"]:.3f} in the
  first quarter of the iterations and {known["last quarter"]:.3f} in the last.
- Log-probs of trainer and vLLM: mean difference {found["mismatch"]["mismatch_mean"]:.1e} nats in the worst iteration, largest {found["mismatch"]["mismatch_max"]:.1e}.
- {found["prefix_cache_hit_rate"]:.0%} of prompt tokens came from vLLM's prefix cache; peak memory of training {found["peak_memory_mb"]:.0f} MiB.

{measured.to_markdown(index=False, floatfmt=".3f", missingval="–")}

{spent.to_markdown(index=False, floatfmt=".0f", missingval="–")}

{stages.to_markdown(index=False, floatfmt=".1f")}
"""


def main(options: argparse.Namespace) -> None:
    check(not (options.out / "run").exists(), f"{options.out} holds a run already; choose another folder")
    commands, began = Commands(options.out), datetime.now(UTC)
    model, index, run = (options.out / name for name in ("model", "index", "run"))
    corpus = options.data / "corpus.jsonl"
    size = [
        "--vocabulary",
        options.vocabulary,
        "--hidden-size",
        options.hidden_size,
        "--layers",
        options.layers,
    ]
    made = commands.run("model", "tiny-model", model, "--corpus", corpus, *size)
    indexed = commands.run("index", "retriever", "index", "--corpus", corpus, "--out", index)
    with Server(commands, index) as server:
        overrides = overrides_of(options, server.port)
        commands.run("preflight", "preflight", *overrides, "--out", run)
        commands.run("warm start", "warm-start", *overrides)
        facts = train_interrupted(commands, server, ["train", *overrides, "--out", run], run)
        results = options.out / "evaluation"
        commands.run("evaluation", "evaluate", run, *overrides, "--out", results, "--decoding", "both")
    updates, evaluations = pd.read_parquet(run / UPDATES_FILE), pd.read_parquet(run / EVALUATIONS_FILE)
    check_tables(updates, evaluations, options.iterations)
    starts = [*options.out.glob("results/qwen/warm_start/*/warm_start.json")]
    check(len(starts) == 1, f"{len(starts)} warm starts were made, not one")
    start = json.loads(starts[0].read_text())
    summary = {
        "model": made.strip().splitlines()[-1].split(",")[0],
        "index": indexed.strip().splitlines()[-1].split(",")[0],
        "overrides": [
            o.replace(str(options.out), "OUT").replace(str(options.data), "DATA") for o in overrides
        ],
        "seconds": commands.seconds | {"in all": round((datetime.now(UTC) - began).total_seconds(), 1)},
        **facts,
        "warm_start": {name: value for name, value in start.items() if name != "made_for"},
        "success_train": {
            name: float(part["success_train"].mean())
            for name, part in (
                ("first quarter", updates.head(len(updates) // 4)),
                ("last quarter", updates.tail(len(updates) // 4)),
            )
        },
        "phases": phases(updates, options.trajectories),
        "mismatch": {
            name: float(updates[name].max()) for name in ("mismatch_mean", "mismatch_max", "mismatch_kl")
        },
        "prefix_cache_hit_rate": float(updates["prefix_cache_hit_rate"].mean()),
        "evaluations": json.loads(evaluations.to_json(orient="records")),
        "test": json.loads((results / BENCHMARKS_FILE).read_text())["results"],
        "peak_memory_mb": json.loads((run / RUN_FILE).read_text())["peak_memory_mb"],
        "provenance": {
            **git_state(),
            "versions": versions(),
            "hardware": hardware(),
            "date": began.date().isoformat(),
        },
    }
    places = [options.out / "summary", *([REFERENCE / "qwen_on_cpu"] if options.record else [])]
    for place in places:
        write_json(place.with_suffix(".json"), summary)
    report = render(summary)
    for place in places:
        write_atomically(place.with_suffix(".md"), lambda part: part.write_text(report, encoding="utf-8"))
    print(report)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--out", type=lambda text: Path(text).resolve(), required=True)
    parser.add_argument("--iterations", type=int, default=20, help="even, at least 6")
    parser.add_argument("--trajectories", type=int, default=16, help="in an iteration")
    parser.add_argument("--warm-start-steps", type=int, default=240)
    parser.add_argument("--questions", type=int, default=3, help="of each evaluation in training")
    parser.add_argument(
        "--train-records", type=int, default=24, help="a sixth or so is held out, as many left to test"
    )
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="keep the summary in results/reference")
    main(parser.parse_args())
