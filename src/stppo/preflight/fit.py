"""`stppo preflight`: what a run needs, what the machine has, and what to change where it does not fit."""

import dataclasses
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from stppo.config.composition import compose
from stppo.config.loading import build, load
from stppo.config.settings import RunConfig
from stppo.files import repository_path
from stppo.policy.known_models import KNOWN
from stppo.policy.policy import LoraSettings, check_positions
from stppo.preflight import requirements
from stppo.preflight.memory import (
    GIB,
    Algorithm,
    EngineRoom,
    Phase,
    disk_parts,
    engine_room,
    host_parts,
    longest,
    micro_batch_tokens,
    phases_of,
)
from stppo.preflight.requirements import Row
from stppo.preflight.shapes import Shape, check_trained_part, policy_config, shape_of, smaller
from stppo.preflight.speed import USUAL, Speed, estimate_speed


@dataclass(frozen=True)
class Machine:
    """What there is, in bytes. gpu: None where there is none, and the host's memory serves."""

    gpu_name: str
    gpu: float | None
    gpu_free: float
    host: float
    disk: float

    @classmethod
    def found(cls, folder: Path, gpu_gib: float | None = None, device: str = "auto") -> "Machine":
        """This machine, its GPU as given by hand where `gpu_gib` (GiB) is; folder: on the disk that is written to.
        device: training.device, which may leave a GPU idle."""
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        disk = shutil.disk_usage(requirements.existing(folder)).free
        if gpu_gib is not None:
            return cls(USUAL, gpu_gib * GIB, gpu_gib * GIB, host, disk)
        if device != "cpu" and torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            return cls(torch.cuda.get_device_name(), total, free, host, disk)
        return cls("none", None, host, host, disk)

    def room(self, made: "Estimate") -> float:
        """What the phases of a run may take: the GPU's memory, or what the host's other parts leave."""
        return self.gpu if self.gpu is not None else self.host - sum(made.host.values())


@dataclass(frozen=True)
class Knob:
    """A setting that would help: what each phase that does not fit would need with it (bytes), and whether all fit."""

    override: str
    phases: dict[str, float]
    fits: bool


@dataclass(frozen=True)
class Estimate:
    """Everything computed from the config alone; sizes in bytes."""

    shape: Shape
    algorithm: Algorithm
    phases: list[Phase]
    engine: EngineRoom | None
    host: dict[str, float]
    disk: dict[str, float]
    speed: Speed

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)


@dataclass(frozen=True)
class Report:
    rows: list[Row]
    estimate: Estimate
    knobs: list[Knob]
    machine: Machine

    @property
    def ok(self) -> bool:
        return all(row.ok is not False for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok} | dataclasses.asdict(self)


def estimate(
    run: RunConfig,
    objective: Any,
    vocabulary: int | None,
    gpu: float | None,
    gpu_name: str = USUAL,
    download: bool = False,
) -> Estimate:
    """objective: built. vocabulary: of the world's tokenizer, where it has one. gpu: its bytes, or None. download: see `disk_parts`."""
    shape = shape_of(policy_config(run.policy, vocabulary), run.policy.lora)
    algorithm = Algorithm.of(run, objective)
    return Estimate(
        shape,
        algorithm,
        phases_of(run, shape, algorithm, gpu),
        engine_room(run, shape, gpu or 0) if run.rollout.engine == "vllm" else None,
        host_parts(run, shape, algorithm, gpu is not None),
        disk_parts(run, shape, algorithm, download),
        estimate_speed(run, shape, algorithm, gpu_name),
    )


def preflight(
    overrides: list[str] | None = None, gpu_gib: float | None = None, out: Path | None = None
) -> Report:
    """Check one run of a config before anything is trained.

    gpu_gib: memory (GiB) of the GPU to plan for; None takes what is here. out: where the run will be written.
    Raises ConfigError where the config itself is wrong, FileNotFoundError where the policy's sizes are unknown.
    """
    config = compose(overrides)
    loaded = load(config)
    run, world, objective = loaded.settings, loaded.world, loaded.objective
    folder = out or repository_path("results") / config["preset"]
    machine = Machine.found(folder, gpu_gib, run.training.device)
    vocabulary = None if world.tokenizer is None else len(world.tokenizer)
    name = run.policy.pretrained
    download = name is not None and name not in KNOWN and not Path(name).is_dir()
    made = estimate(run, objective, vocabulary, machine.gpu, machine.gpu_name, download)
    check_trained_part(run.policy, made.shape, made.algorithm.critic)
    check_positions(made.shape.positions, run.rollout.max_tokens)  # of models that are known and not here
    rows = [
        *requirements.software(run, gpu_gib is not None),
        *requirements.model(run),
        *requirements.data(world, config["world"]),
        requirements.writable(folder),
        *_fits(run, made, machine),
    ]
    knobs = []
    if made.peak.total > machine.room(made):
        knobs = list(_knobs(run, objective, vocabulary, made, machine))
    return Report(rows, made, knobs, machine)


def shortage(run: RunConfig) -> str | None:
    """One line where a run may need more memory than is free on this machine now, with the settings that would help; None
    where it fits. It takes a fraction of a second: nothing but memory is looked at.

    Raises FileNotFoundError where the policy's sizes are not known here, ConfigError where what is to be trained of it is
    not there.
    """
    objective = build(run.algorithm.objective, "algorithm.objective")
    vocabulary = None
    if run.policy.pretrained is None:
        vocabulary = len(build(run.world, "world").tokenizer)
    machine = Machine.found(Path(), device=run.training.device)
    made = estimate(run, objective, vocabulary, machine.gpu, machine.gpu_name)
    check_trained_part(run.policy, made.shape, made.algorithm.critic)
    on_gpu = machine.gpu is not None
    free = replace(machine, gpu=machine.gpu_free if on_gpu else None, host=min(machine.host, _free_host()))
    if made.peak.total <= free.room(made):
        return None
    beside, there = (0.0, free.gpu) if on_gpu else (sum(made.host.values()), free.host)
    name, peak = made.peak.name, made.peak.total
    knobs = [knob for knob in _knobs(run, objective, vocabulary, made, free) if name in knob.phases]
    helping = ", ".join(
        f"{knob.override} (to {_gib(knob.phases[name] + beside)}{', fits' * knob.fits})"
        for knob in knobs
        if knob.phases[name] < peak - 0.01 * GIB
    )
    return (
        f"memory may run out: {name} takes up to {_gib(peak + beside)}, if every trajectory is as long as allowed, and "
        f"{_gib(there)} are free{' on the GPU' * on_gpu}; {_largest(made.peak.parts)}; what would help, each alone: "
        f"{helping or 'no setting that is known'}; more by `stppo preflight`"
    )


def _free_host() -> float:
    """Bytes of the host's memory that are free now or can be freed; infinite where the system does not say it."""
    try:
        found = Path("/proc/meminfo").read_text(encoding="ascii").partition("MemAvailable:")[2]
        return 1024.0 * int(found.split()[0])
    except (OSError, ValueError, IndexError):
        return math.inf


def _fits(run: RunConfig, made: Estimate, machine: Machine) -> Iterator[Row]:
    memory = machine.room(made)
    kind = "GPU" if machine.gpu else "host (no GPU)"
    for phase in made.phases:
        yield Row(
            f"{kind} memory, {phase.name}",
            _gib(memory) if memory > 0 else f"none of {_gib(machine.host)}: {_together(made.host)}",
            _gib(phase.total),
            phase.total <= memory,
            "see the knobs below; " + _largest(phase.parts),
        )
    if machine.gpu and machine.gpu_free < 0.95 * machine.gpu:
        yield Row(
            "GPU memory, free now",
            _gib(machine.gpu_free),
            _gib(machine.gpu),
            None,
            "another process uses this GPU (nvidia-smi)",
        )
    if made.engine is not None and machine.gpu:
        yield Row(
            "vLLM's KV cache",
            f"{_gib(max(made.engine.cache, 0))}, {made.engine.trajectories} trajectories",
            f"1, better {run.rollout.max_num_seqs}",
            made.engine.trajectories >= 1,
            f"its weights take {_gib(made.engine.weights)}: raise rollout.gpu_memory_utilization, set "
            "rollout.dtype=bfloat16, or lower rollout.max_tokens",
        )
    host = sum(made.host.values())
    needed, parts = host, made.host
    if machine.gpu is None:
        needed, parts = host + made.peak.total, made.host | made.peak.parts
    shrink = "policy.lora='{rank: 16}'" + (" or training.optimizer=adam8bit" if machine.gpu else "")
    remedy = f"{shrink} shrink the checkpoint; " if machine.gpu else "see the knobs below; "
    yield Row(
        "host memory" if machine.gpu else "host memory, with all that is beside the largest phase",
        _gib(machine.host),
        _gib(needed),
        needed <= machine.host,
        remedy + _largest(parts),
    )
    disk = sum(made.disk.values())
    yield Row(
        "disk, one run",
        f"{_gib(machine.disk)} free",
        _gib(disk),
        disk <= machine.disk,
        "make room, or write elsewhere (--out); " + _largest(made.disk),
    )


def _knobs(
    run: RunConfig, objective: Any, vocabulary: int | None, made: Estimate, machine: Machine
) -> Iterator[Knob]:
    """Settings that lower a phase that does not fit, cheapest first, each tried alone."""
    too_large = {phase.name: phase.total for phase in made.phases if phase.total > machine.room(made)}
    for override, changed, other in _variants(run, objective, made, machine.gpu is not None):
        tried = estimate(changed, other, vocabulary, machine.gpu, machine.gpu_name)
        phases = {phase.name: phase.total for phase in tried.phases if phase.name in too_large}
        if any(too_large[name] - size > 0.01 * GIB for name, size in phases.items()):
            yield Knob(override, phases, tried.peak.total <= machine.room(tried))


def _variants(
    run: RunConfig, objective: Any, made: Estimate, on_gpu: bool
) -> Iterator[tuple[str, RunConfig, Any]]:
    """(override, run with it, objective with it); those that change no result come first."""
    training, rollout, policy = run.training, run.rollout, run.policy

    def trained(**changes: Any) -> RunConfig:
        return run.model_copy(update={"training": training.model_copy(update=changes)})

    tokens = micro_batch_tokens(run, made.shape)[0]
    row = longest(run, made.shape)  # no micro-batch holds less
    for fewer in dict.fromkeys((max(tokens // 2, row), row)):
        yield f"training.micro_batch_tokens={fewer}", trained(micro_batch_tokens=fewer), objective
    if not training.gradient_checkpointing:
        yield "training.gradient_checkpointing=true", trained(gradient_checkpointing=True), objective
    if rollout.engine == "vllm":
        if rollout.gpu_memory_utilization > 0.2:
            lower = round(rollout.gpu_memory_utilization - 0.1, 2)
            changed = replace(rollout, gpu_memory_utilization=lower)
            yield (
                f"rollout.gpu_memory_utilization={lower}",
                run.model_copy(update={"rollout": changed}),
                objective,
            )
        if rollout.sleep_level == 0:
            changed = replace(rollout, sleep_level=2)
            yield "rollout.sleep_level=2", run.model_copy(update={"rollout": changed}), objective
    else:
        lanes = max(rollout.batch_size // 2, 1)
        changed = replace(rollout, batch_size=lanes)
        yield f"rollout.batch_size={lanes}", run.model_copy(update={"rollout": changed}), objective
    if training.precision == "float32":
        yield "training.precision=bfloat16", trained(precision="bfloat16"), objective
    if training.optimizer == "adam" and on_gpu:
        yield "training.optimizer=adam8bit", trained(optimizer="adam8bit"), objective
    n = training.trajectories_per_iteration // 2
    if n > 1 and n % training.minibatches == 0 and n % objective.credit.group_size == 0:
        yield f"training.trajectories_per_iteration={n}", trained(trajectories_per_iteration=n), objective
    if training.kl_coefficient:
        yield "training.kl_coefficient=0", trained(kl_coefficient=0.0), objective
    if policy.pretrained and policy.trainable_layers is None and made.shape.layers > 2:
        top = made.shape.layers // 3
        changed = replace(policy, trainable_layers=top)
        yield f"policy.trainable_layers={top}", run.model_copy(update={"policy": changed}), objective
    if run.warm_start.trained_weights == "all" and (policy.lora or policy.trainable_layers):
        changed = run.warm_start.model_copy(update={"trained_weights": "policy"})
        yield "warm_start.trained_weights=policy", run.model_copy(update={"warm_start": changed}), objective
    if policy.lora is None:
        changed = replace(policy, lora=LoraSettings())
        yield "'policy.lora={rank: 16}'", run.model_copy(update={"policy": changed}), objective
    if made.algorithm.critic:
        other = build(compose(["algorithm=grpo"])["algorithm"]["objective"], "algorithm")
        yield "algorithm=grpo (no critic)", run, other
    if policy.pretrained and (name := smaller(policy.pretrained)):
        changed = replace(policy, pretrained=name)
        yield f"policy.pretrained={name}", run.model_copy(update={"policy": changed}), objective


# ---- text ---------------------------------------------------------------------------------------


def text(report: Report) -> str:
    """The table, what does not fit and how to mend it, and what an iteration is made of."""
    made, machine = report.estimate, report.machine
    shape, speed = made.shape, made.speed
    lines = [
        f"{shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers of {shape.hidden}, vocabulary "
        f"{shape.vocabulary:,}. Memory and time are estimates (worst case: every trajectory as long as allowed), the rest "
        "was looked up here.",
        "",
    ]
    cells = [("what", "found", "needed", "")]
    cells += [
        (r.what, r.found, r.needed, {True: "ok", False: "FAIL", None: "note"}[r.ok]) for r in report.rows
    ]
    width = [min(max(len(row[i]) for row in cells), limit) for i, limit in enumerate((44, 60, 44))]
    for row, source in zip(cells, [None, *report.rows], strict=True):
        cut = [c if len(c) <= w else c[: w - 3] + "..." for c, w in zip(row, width, strict=False)]
        lines.append("  ".join(f"{c:<{w}}" for c, w in zip(cut, width, strict=True)) + f"  {row[3]}")
        if source is not None and source.ok is not True and source.remedy:
            lines.append(f"    -> {source.remedy}")
    lines += ["", f"Memory in GiB, largest phase ({made.peak.name}):"]
    parts = sorted(made.peak.parts.items(), key=lambda item: -item[1])
    lines += [
        f"  {size / GIB:8.2f}  {name}" for name, size in parts if size >= 0.005 * GIB or size is parts[0][1]
    ]
    if report.knobs:
        before = {phase.name: phase.total for phase in made.phases}
        lines += ["", "What would help, each alone, in GiB; those that change no result first:"]
        for knob in report.knobs:
            changes = ", ".join(
                f"{name} {(size - before[name]) / GIB:+.1f} to {size / GIB:.1f}"
                for name, size in knob.phases.items()
            )
            lines.append(f"  {knob.override}: {changes}{' (fits)' if knob.fits else ''}")
    about = ", ".join(f"{name} {seconds:.1f}" for name, seconds in speed.seconds.items())
    if machine.gpu is not None:
        lines += [
            "",
            f"Seconds of an iteration on one {speed.gpu}, if trajectories have {speed.trajectory_tokens} tokens "
            f"({speed.agent_tokens} of the agent): {about}; {speed.iteration:.1f} together, {speed.hours:.1f} h for "
            f"{speed.iterations} iterations.",
        ]
    lines += [
        "",
        "ready" if report.ok else f"{sum(row.ok is False for row in report.rows)} checks failed",
    ]
    return "\n".join(lines)


def _largest(parts: dict[str, float]) -> str:
    name = max(parts, key=parts.get)
    return f"the largest part is {name} ({_gib(parts[name])})"


def _together(parts: dict[str, float]) -> str:
    return " + ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"
