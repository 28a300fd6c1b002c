"""What only a GPU can say: `make gpu`, eight minutes on one card, or `python benchmarks/gpu.py --quick` on a CPU.

1. Training: a warm start of `preset=workstation`, then token PPO and ST-PPO for as long as `--minutes` allow, recorded as any
   run. Seconds by phase, trained tokens a second, their share of what a large product reaches on this card, and peak memory
   against the estimate of `stppo preflight`.
2. Arithmetic: log-probs of the same tokens under the same weights, computed in other ways, against a CPU in float32. How many
   tokens, turns and trajectories leave [.8, 1.2] from that alone: so much of "off-policy" no training has caused. For the
   policy of 1, and for random weights of SmolLM2-135M's shape.
3. `--records 'world.records={musique: FILE, 2wikimultihopqa: FILE}'`, after `stppo fetch smollm2`, in place of both: token PPO and
   Turn-PPO with SmolLM2, twenty iterations of `preset=smollm`, beside each other on the card.

Where time runs out, runs stop at their last checkpoint, and the same command goes on from there.

Needs torch 2.11 and transformers 5.17 or newer, pandas, pyarrow and scipy; nothing is downloaded. On a machine without network these wheels
must come along: annotated-types, antlr4-python3-runtime 4.9.3, bm25s, filelock, hydra-core, omegaconf, pydantic, pydantic-core, tenacity and
typing-inspection. Four megabytes; tried so with torch 2.11 and transformers 5.17, on a CPU.
"""

import argparse
import contextlib
import copy
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from run import Table, markdown, provenance
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stppo.config.composition import compose
from stppo.config.loading import load
from stppo.files import parse_json
from stppo.objectives import Ratio
from stppo.policy.compute import body_of, computing, device_of, place
from stppo.policy.policy import score
from stppo.preflight.check import preflight
from stppo.record.runs import collect
from stppo.record.schema import COMPLETED, NON_FINITE, RUN_FILE
from stppo.training.batches import QueuedBatch
from stppo.training.metrics import read_tables
from stppo.training.run import Run
from stppo.training.warm_start import ensure_warm_start
from stppo.trajectories import Trajectories

GIB = 2**30
ALGORITHMS = ("token_ppo", "st_ppo")
SMOLLM2 = dict(hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3)
SMOLLM2 |= dict(intermediate_size=1536, vocab_size=49152, max_position_embeddings=2048)
TINY = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3)
TINY |= dict(intermediate_size=64, vocab_size=512, max_position_embeddings=256)
SEGMENTS = {
    "tokens": Ratio("token"),
    "turns": Ratio("turn"),
    "turns, product": Ratio("turn", "product"),
    "trajectories": Ratio("sequence"),
    "trajectories, product": Ratio("sequence", "product"),
}


# ---- 1. training --------------------------------------------------------------------------------


class OutOfTime(BaseException):
    """As Ctrl-C: the run stops in order, with its last checkpoint."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupts what is inside after so many seconds."""

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, seconds))
    try:
        yield
    except OutOfTime:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def large_product(device: torch.device) -> float:
    """Floating-point operations a second of a large product, in bfloat16 on a GPU."""
    n, kind = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    a, b = (torch.randn(n, n, device=device, dtype=kind) for _ in range(2))
    best = min(seconds_of(lambda: a @ b, device) for _ in range(10))
    return 2.0 * n**3 / best


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def large_copy(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    n = 2**32 if device.type == "cuda" else 2**24
    a, b = (torch.empty(n, dtype=torch.uint8, device=device) for _ in range(2))
    return 2.0 * n / min(seconds_of(lambda: b.copy_(a), device) for _ in range(5))


@contextlib.contextmanager
def watched(device: torch.device) -> Iterator[list[int]]:
    """Per cent of the time in which the card computes, looked at ten times a second; empty where that cannot be asked."""
    found: list[int] = []
    over = threading.Event()

    def look() -> None:
        with contextlib.suppress(Exception):  # without nvidia-ml-py
            while device.type == "cuda" and not over.wait(0.1):
                found.append(torch.cuda.utilization())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def share(percents: list[int]) -> str:
    return f"{sum(percents) / len(percents):.0f} %" if percents else "–"


def made_in_time(overrides: list[str], seconds: float) -> Path | None:
    """The warm start, made where none is cached; None, and a line, where it is not done in time."""
    found = None
    try:
        with at_most(seconds):
            found = ensure_warm_start(load(compose(overrides)))
    except ValueError as error:
        print(error, flush=True)
    return found


def phases(run: Run, reached: float, copied: float, busy: list[int]) -> dict[str, str]:
    """Medians over the whole iterations but the first of a run, which warms up; then one roll-out more, looked at closely."""
    whole = run.trainer.iteration - (not run.trainer.is_whole)  # time may have run out within one
    rows = [row for row in run.trainer.update_rows if row["iteration"] <= whole]
    updates = [row for row in rows if row["iteration"] > 1] or rows
    batch = run.trainer.queue[0].trajectories
    training = run.settings.training
    tokens = float(batch.lengths.sum()) * training.epochs
    by_iteration: dict[int, list[dict]] = {}
    for row in updates:
        by_iteration.setdefault(row["iteration"], []).append(row)
    middle = len(by_iteration) // 2
    update = sorted(sum(row["seconds_update"] for row in rows) for rows in by_iteration.values())[middle]
    parts = {
        name: sorted(rows[0][f"seconds_{name}"] for rows in by_iteration.values())[middle]
        for name in ("rollout", "scoring", "critic")
    }
    parameters = sum(p.numel() for p in run.trainer.parameters)
    speed = 6.0 * parameters * tokens / update / reached
    passes, device = 0, device_of(run.trainer.policy)

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    hook = body_of(run.trainer.policy).register_forward_hook(count)
    with watched(device) as sampling:
        sampled: list[QueuedBatch] = []
        seconds = seconds_of(lambda: sampled.append(run.trainer.batches.sample(0, 0)), device)
    hook.remove()
    agent = sampled[0].metrics["tokens_rollout"]
    # Bytes: each pass reads all weights once, on a GPU as bfloat16.
    read = passes * parameters * (2 if device.type == "cuda" else 4)
    return {
        "algorithm": run.settings.algorithm.name,
        "iterations": str(whole),
        **{f"{name}, s": f"{seconds:.2f}" for name, seconds in parts.items()},
        "updates, s": f"{update:.2f}",
        "tokens a second in updates": f"{tokens / update:,.0f}",
        "share of a large product's speed": f"{speed:.1%}",
        "card computes": share(busy),
        "agent tokens a second in a roll-out": f"{agent / seconds:,.0f}",
        "passes": str(passes),
        "ms a pass": f"{1000 * seconds / passes:.1f}",
        "share of a copy's speed": f"{read / seconds / copied:.1%}",
        "card computes, roll-out": share(sampling),
    }


def memory(overrides: list[str], peaks: dict[str, float]) -> Table:
    """Peak GiB of each algorithm's run against the larger phase of its estimate."""
    rows = []
    for algorithm, peak in peaks.items():
        estimated = preflight([*overrides, f"algorithm={algorithm}"]).estimate.phases
        most = max(sum(parts.values()) for name, parts in estimated.items() if name != "warm start") / GIB
        row = {"algorithm": algorithm, "estimated GiB": f"{most:.2f}", "peak GiB": f"{peak:.2f}"}
        rows.append(row | {"estimated / peak": f"{most / peak:.2f}" if peak else "–"})
    return rows


# ---- 2. arithmetic ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How log-probs are computed. weights, computing: types of both; rows: scored together; 0: all."""

    device: str
    weights: str = "float32"
    computing: str = "float32"
    attention: str = "sdpa"
    rows: int = 0
    compiled: bool = False

    @property
    def name(self) -> str:
        parts = [self.device.upper(), self.computing]
        parts += [f"weights {self.weights}"] * (self.weights != "float32")
        parts += [self.attention] * (self.attention != "sdpa")
        parts += ["each row alone"] * (self.rows == 1) + ["compiled"] * self.compiled
        return ", ".join(parts)


def ways(device: str) -> list[Way]:
    """All that is compared with the CPU in float32."""
    half = dict(computing="bfloat16")
    found = [Way("cpu", rows=1), Way("cpu", attention="eager"), Way("cpu", **half)]
    if device != "cpu":
        found += [Way(device), Way(device, rows=1), Way(device, attention="eager"), Way(device, **half)]
    found += [Way(device, rows=1, **half), Way(device, weights="bfloat16", **half)]
    return [*found, Way(device, attention="eager", **half), Way(device, compiled=True, **half)]


@torch.no_grad()
def logprobs(policy: PreTrainedModel, batch: Trajectories, way: Way) -> Tensor:
    """(N,) log-probs of the agent's tokens, float64 on the CPU."""
    torch.set_num_threads(os.cpu_count() or 1)  # a run computes with one
    model = copy.deepcopy(policy)
    model.set_attn_implementation(way.attention)
    place(model, torch.device(way.device), way.computing)
    if way.weights == "bfloat16":
        model.to(torch.bfloat16)
    if way.compiled:
        body_of(model).forward = torch.compile(body_of(model).forward, dynamic=True)
    size = way.rows or len(batch)
    parts = torch.arange(len(batch)).split(size)
    found = torch.zeros(batch.tokens.shape, dtype=torch.float64)
    for rows in parts:
        part = batch.select(rows)
        with computing(body_of(model)):
            scored = score(model, part).logprobs.double().cpu()
        found[rows, : scored.shape[1]] = scored
    return batch.layout.gather(found)


def differences(policy: PreTrainedModel, batch: Trajectories, device: str) -> Table:
    """A row a way: differences of log-probs from the CPU's in float32, and shares of ratios outside [.8, 1.2]."""
    base = logprobs(policy, batch, Way("cpu"))
    rows = []
    for way in ways(device):
        try:
            off = logprobs(policy, batch, way) - base
        except Exception as error:  # a compiler that is not there: the other ways are still worth their time
            print(f"{way.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        row = {"computed": way.name, "mean |difference|, nats": f"{off.abs().mean():.1e}"}
        row["largest"] = f"{off.abs().max():.1e}"
        for name, ratio in SEGMENTS.items():
            value = ratio(off, batch.layout)
            row[f"{name} outside [.8, 1.2]"] = f"{((value < 0.8) | (value > 1.2)).double().mean():.2%}"
        rows.append(row)
    return rows


def random_policy(shape: dict[str, int]) -> PreTrainedModel:
    """A Llama with random weights, its output layer scaled so that a token's entropy is about one nat."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", tie_word_embeddings=False, **shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()
    with torch.no_grad():
        ids = torch.randint(shape["vocab_size"], (4, 32))
        scale = 1.0
        while True:
            logits = scale * model(ids).logits
            entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
            if entropy < 1.0:
                break
            scale *= 1.1
        model.get_output_embeddings().weight.mul_(scale)
    return model


@torch.no_grad()
def written(policy: PreTrainedModel, device: str, rows: int = 64) -> Trajectories:
    """Trajectories that a policy has written from random prompts: two turns of 20 and 12 tokens in 132, as SmolLM2's."""
    torch.manual_seed(1)
    prompt, length = torch.randint(policy.config.vocab_size, (rows, 40)), 132
    tokens = policy.to(device).generate(
        prompt.to(device), do_sample=True, top_k=0, min_new_tokens=length - 40, max_new_tokens=length - 40
    )
    policy.cpu()
    mask = torch.zeros(rows, length, dtype=torch.bool)
    mask[:, 40:60] = mask[:, 115:127] = True
    return Trajectories(
        tokens=tokens.cpu(),
        lengths=torch.full((rows,), length),
        agent_mask=mask,
        behaviour_logprobs=torch.zeros(rows, length),
        rewards=torch.zeros(rows, length),
        group_ids=torch.arange(rows),
        policy_updates=torch.zeros(rows, dtype=torch.int64),
    )


# ---- 3. a language model ---------------------------------------------------------------------------


def language_model(overrides: list[str], out: Path, end: float) -> Table:
    """Both runs in processes of their own until they are done or time is over; a row for each."""
    start = made_in_time([*overrides, "algorithm=token_ppo"], end - time.monotonic())
    folders = {name: out / "runs" / f"smollm_{name}" for name in ("token_ppo", "turn_ppo")}
    train = [sys.executable, "-c", "from stppo.cli import main; main()", "train", *overrides]
    running = [
        subprocess.Popen([*train, f"algorithm={name}", "--out", str(folder)])
        for name, folder in folders.items()
        if start
    ]
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(1.0, end - time.monotonic()))
    for process in running:
        process.send_signal(signal.SIGINT)
        process.wait()
    gather(list(folders.values()), out / "metrics_smollm")
    return [seconds_in(name, folder) for name, folder in folders.items() if (folder / RUN_FILE).is_file()]


def seconds_in(name: str, folder: Path) -> dict[str, str]:
    """What a run's own tables say, finished or not: medians over iterations."""
    record = parse_json((folder / RUN_FILE).read_bytes())
    updates, evaluations = read_tables(folder)
    rows = pd.DataFrame(updates).groupby("iteration")
    row = {"algorithm": name, "iterations": str(record["iterations"])}
    for part, median in (
        ("rollout", rows["seconds_rollout"].first().median()),
        ("critic", rows["seconds_critic"].first().median()),
        ("updates", rows["seconds_update"].sum().median()),
    ):
        row[f"{part}, s"] = f"{median:.1f}"
    row["peak GiB"] = f"{(record['gpu_peak_memory_mb'] or 0.0) / 1024:.1f}"
    sampled = [f"{each['success']:.2f}" for each in evaluations if each["temperature"]]
    return row | {"success, sampled": ", ".join(sampled)}


def gather(folders: list[Path], out: Path) -> None:
    """The metrics of those runs that have come to their end."""
    files = [folder / RUN_FILE for folder in folders]
    done = [
        file.parent
        for file in files
        if file.is_file() and parse_json(file.read_bytes())["status"] in (COMPLETED, NON_FINITE)
    ]
    if done:
        collect(done, out)


# ---- all ---------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="of everything")
    parser.add_argument("--out", type=Path, default=Path("results/gpu"))
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, on the CPU")
    parser.add_argument("--warm-start", type=Path, help="its folder; default: made, or as cached")
    parser.add_argument(
        "--records", help="the override that names questions: SmolLM2 is trained, and nothing else"
    )
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    end = time.monotonic() + 60 * given.minutes
    if not given.quick and not torch.cuda.is_available():
        raise SystemExit("no GPU is here; --quick tries everything on the CPU, at the smallest sizes")
    device = "cpu" if given.quick else "cuda"
    preset = "smoke" if given.quick else "workstation"
    kept = ["training.kernels=eager"] if given.quick else ["training.checkpoint_every=2"]
    overrides = [f"preset={preset}", *kept, *given.overrides]
    given.out.mkdir(parents=True, exist_ok=True)
    tables: dict[str, Table] = {}

    def keep() -> None:
        content = {"provenance": provenance() | {"card": card(device)}, "tables": tables}
        (given.out / "gpu.json").write_text(json.dumps(content, indent=1), encoding="utf-8")

    if given.records:
        seldom = ["evaluation.every=20", "evaluation.greedy_every=20", "training.checkpoint_every=2"]
        smollm = ["preset=smollm", f"training.device={device}", *seldom, given.records, *given.overrides]
        tables["SmolLM2, seconds an iteration (two runs beside each other)"] = language_model(
            smollm, given.out, end
        )
        return show(tables, keep)

    reached, copied = large_product(torch.device(device)), large_copy(torch.device(device))
    tables["The card"] = [
        {"a large product, TFLOP/s": f"{reached / 1e12:.2f}", "a large copy, GB/s": f"{copied / 1e9:.0f}"}
    ]
    folders, peaks = [], {}
    first = [*overrides, "algorithm=token_ppo"]
    start = given.warm_start or made_in_time(first, 0.4 * (end - time.monotonic()))
    if start is None:  # phases and memory are those of any policy that keeps to the protocol
        print("no warm start in time: training begins from one that has only seen the protocol", flush=True)
        overrides += ["warm_start.reading.target_accuracy=0", "warm_start.target_success=0"]
        overrides += ["warm_start.evaluate_every=200", "warm_start.demonstrations=4096"]
        start = made_in_time([*overrides, "algorithm=token_ppo"], 0.3 * (end - time.monotonic()))
    for algorithm in ALGORITHMS if start else ():
        run = None
        gc.collect()  # the memory of the run before is not this one's
        run = Run(
            load(compose([*overrides, f"algorithm={algorithm}"])), given.out / "runs" / algorithm, start
        )
        folders.append(run.folder)
        # the rest is the second table's
        with watched(torch.device(device)) as busy, at_most(0.35 * (end - time.monotonic())):
            run.train()
        if not run.trainer.queue:
            trainer = run.trainer
            trainer.queue.append(trainer.batches.sample(trainer.iteration, trainer.update))
        if run.trainer.iteration - (not run.trainer.is_whole) < 1:
            print(f"{algorithm}: no iteration was done in time; give --minutes more", flush=True)
            continue
        tables.setdefault("One iteration by phase", []).append(phases(run, reached, copied, busy))
        peaks[algorithm] = torch.cuda.max_memory_allocated() / GIB if device == "cuda" else 0.0
        tables["Memory"] = memory(overrides, peaks)
        keep()
    if start:
        policy, queued = run.trainer.policy.cpu(), run.trainer.queue[0].trajectories
        fresh = queued.select(range(min(64, len(queued))))
        tables["Arithmetic, the policy that was trained"] = differences(policy, fresh, device)
        gather(folders, given.out / "metrics")
        keep()
    shaped = random_policy(TINY if given.quick else SMOLLM2)
    fresh = written(shaped, device, 4 if given.quick else 64)
    tables["Arithmetic, random weights of SmolLM2-135M's shape"] = differences(shaped, fresh, device)
    show(tables, keep)


def show(tables: dict[str, Table], keep: Callable[[], None]) -> None:
    keep()
    for title, rows in tables.items():
        if rows:
            print(markdown(title, rows), flush=True)


def card(device: str) -> dict[str, str]:
    """Name, driver and CUDA of the card."""
    if device == "cpu":
        return {"name": "none"}
    driver = os.popen("nvidia-smi --query-gpu=driver_version --format=csv,noheader").read().strip()
    return {"name": torch.cuda.get_device_name(), "driver": driver, "cuda": str(torch.version.cuda)}


if __name__ == "__main__":
    main()
