"""`stppo preflight`: what a run needs, what the machine has, and what to change where it does not fit."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from stppo.config.composition import compose
from stppo.config.loading import LoadedRun, load
from stppo.config.settings import RunConfig
from stppo.files import repository_path
from stppo.preflight import requirements
from stppo.preflight.estimate import GIB, Estimate, estimate, models_of
from stppo.preflight.requirements import Row

# Settings, and the parts of the memory that they lower; those that change no result first.
LOWER = {
    "training.micro_batch_tokens=FEWER": ("activations", "logits"),
    "training.gradient_checkpointing=true": ("activations",),
    "rollout.batch_size=FEWER": ("KV cache",),
    "rollout.gpu_memory_utilization=LESS": ("vLLM",),
    "training.optimizer=adam8bit (on a GPU)": ("adam", "checkpoint"),
    "training.kl_coefficient=0": ("reference",),
    "policy.trainable_layers=N (pretrained)": ("adam", "gradients", "activations"),
    "'policy.lora={rank: 16}'": ("adam", "gradients", "policy", "reference", "checkpoint"),
    "algorithm=grpo (no critic)": ("critic",),
}


@dataclass(frozen=True)
class Report:
    parameters: int
    rows: list[Row]
    estimate: Estimate

    @property
    def ok(self) -> bool:
        return all(row.ok is not False for row in self.rows)

    def text(self) -> str:
        """A line for each row, with the remedy where it is not ok."""
        lines = [f"{self.parameters / 1e6:,.1f} M parameters; memory and disk are estimates"]
        for row in self.rows:
            mark = {True: "ok", False: "FAIL", None: "note"}[row.ok]
            lines.append(f"{mark:<4}  {row.what}: {row.found} (needed: {row.needed})")
            lines += [f"      -> {row.remedy}"] * bool(row.remedy and not row.ok)
        failed = sum(row.ok is False for row in self.rows)
        return "\n".join([*lines, f"{failed} checks failed" if failed else "ready"])


def preflight(
    overrides: list[str] | None = None, gpu_gib: float | None = None, out: Path | None = None
) -> Report:
    """Check one run before anything is trained. gpu_gib: of the GPU to plan for; None: what is here.

    Raises ConfigError where the config itself is wrong, FileNotFoundError where the policy's sizes are
    neither here nor on the hub.
    """
    loaded = load(compose(overrides))
    run, folder = loaded.settings, out or repository_path("results") / loaded.config["preset"]
    gpu, free = gpu_memory(run) if gpu_gib is None else (gpu_gib * GIB, gpu_gib * GIB)
    models = models_of(loaded, local=False)
    made = estimate(run, models, gpu)
    rows = [
        *requirements.software(run, gpu_gib is not None),
        *requirements.model(run),
        *requirements.data(loaded.world, run.world),
        *requirements.prompts(loaded.world, run),
    ]
    kind, there = ("GPU", free) if gpu else ("host", host_memory())
    rows += [_row(f"{kind} memory, {phase}", there, parts) for phase, parts in made.phases.items()]
    if gpu:
        rows.append(_row("host memory", host_memory(), made.host))
    if made.cached is not None:
        remedy = "raise rollout.gpu_memory_utilization, or lower rollout.max_tokens or rollout.dtype"
        needed = f"1, better {run.rollout.max_num_seqs}"
        rows.append(Row("vLLM's KV cache", f"{made.cached} trajectories", needed, made.cached > 0, remedy))
    disk = shutil.disk_usage(requirements.existing(folder)).free
    rows.append(_row("disk, one run", disk, made.disk, "make room, or write elsewhere (--out)"))
    return Report(models.parameters, rows, made)


def shortage(loaded: LoadedRun) -> str | None:
    """One line where a run may need more memory than is free now, and what would help; None where it fits.

    Raises as `models_of`.
    """
    run = loaded.settings
    gpu, free = gpu_memory(run)
    free = free if gpu else host_memory("MemAvailable")
    phases = estimate(run, models_of(loaded), gpu).phases
    phase, parts = max(phases.items(), key=lambda item: sum(item[1].values()))
    if (needed := sum(parts.values())) <= free:
        return None
    return (
        f"memory may run out: {phase} takes up to {_gib(needed)}, if every trajectory is as long as allowed, "
        f"and {_gib(free)} are free{' on the GPU' if gpu else ''}; {_largest(parts)}; "
        "more by `stppo preflight`"
    )


def gpu_memory(run: RunConfig) -> tuple[float | None, float]:
    """(All, free) bytes of the GPU that a run would use; None where it uses none."""
    if run.training.device == "cpu" or not torch.cuda.is_available():
        return None, 0.0
    free, total = torch.cuda.mem_get_info()
    return float(total), float(free)


def host_memory(entry: str = "MemTotal") -> float:
    """Bytes of the host's memory; with MemAvailable those that are free, where the system says it."""
    try:
        found = Path("/proc/meminfo").read_text(encoding="ascii").partition(f"{entry}:")[2]
        return 1024.0 * int(found.split()[0])
    except (OSError, ValueError, IndexError):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _row(what: str, there: float, parts: dict[str, float], remedy: str = "") -> Row:
    needed = sum(parts.values())
    return Row(what, _gib(there), _gib(needed), needed <= there, remedy or _largest(parts))


def _largest(parts: dict[str, float]) -> str:
    """The largest parts, and the settings that lower one of them."""
    largest = sorted(parts, key=parts.__getitem__, reverse=True)[:4]
    told = ", ".join(f"{name} {_gib(parts[name])}" for name in largest)
    kinds = {name.rpartition(": ")[2] for name in largest}
    helping = [setting for setting, lowered in LOWER.items() if kinds & set(lowered)]
    return f"the largest parts are {told}; what would help: {', '.join(helping) or 'a smaller policy'}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"
