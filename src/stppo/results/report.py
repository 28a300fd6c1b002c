"""One self-contained HTML page: what was run, what came out, beside the committed reference."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stppo import schema
from stppo.files import write_atomically
from stppo.results.captions import describe_setting, short
from stppo.results.report_figures import OBJECTIVES, figure_sections
from stppo.results.runs import KEYS, Metrics, load_metrics
from stppo.results.style import in_order, look
from stppo.study import words
from stppo.study.arms import COVERED, MAIN, variant
from stppo.study.claims import CSV_FILE, INCONCLUSIVE, NOT_SUPPORTED, NOT_TESTED, PROVISIONAL, SUPPORTED
from stppo.study.evaluation import ANSWERS_FILE, COVERAGE_FILE, SENSITIVITY_FILE, SUMMARY_FILE
from stppo.study.tuning import collapse_shares

METRICS, FIGURES, CLAIMS = "metrics", "figures", "claims"
# Of a reference that was registered beforehand: what chose the main regime, and runs made again elsewhere.
PROTOCOL, TUNING, AGAIN = "PROTOCOL.md", "tuning/stage1/metrics", "processor/metrics"
FALLBACK_PRESET = "laptop"


def _names(*folders: Path | None) -> list[dict[str, Any]]:
    """The rows of the axes table that lies beside the schematic, of the first folder that has it."""
    for file in (folder / f"{OBJECTIVES}.csv" for folder in folders if folder):
        if file.is_file():
            rows = pd.read_csv(file, dtype=str, keep_default_na=False).to_dict("records")
            return [{**row, "look": look(row["algorithm"])} for row in rows]
    return []


def _distinct(values: list[Any]) -> list[Any]:
    return sorted({value for value in values if value is not None}, key=str)


def _provenance(metrics: Metrics) -> dict[str, str]:
    """Label -> value, for people; values that differ between runs are all listed."""
    runs = metrics.runs
    commits = _distinct([run.get("git_commit") for run in runs])
    dirty = any(run.get("git_dirty") for run in runs)
    versions = {
        name: _distinct([run.get("versions", {}).get(name) for run in runs])
        for name in _distinct([name for run in runs for name in run.get("versions", {})])
    }
    machines = _distinct([_machine(run.get("hardware", {})) for run in runs])
    wall = metrics.summary["wall_seconds"]
    peak = max((run.get("peak_memory_mb") or math.nan for run in runs), default=math.nan)
    seeds = ", ".join(str(seed) for seed in _distinct([run["seed"] for run in runs]))
    started = _distinct([run.get("started") for run in runs])
    return {
        "runs": f"{len(runs)} ({len(metrics.algorithms())} algorithms, regimes {', '.join(metrics.regimes)}, seeds {seeds})",
        "git commit": ", ".join(commit[:12] for commit in commits)
        + (" with uncommitted changes" if dirty else "")
        if commits
        else "not recorded (outside git)",
        "code hash": ", ".join(_distinct([run.get("code_hash") for run in runs])) or "not recorded",
        "configurations": f"{len(_distinct([run.get('config_fingerprint') for run in runs]))} different, listed below",
        "hardware": "; ".join(machines) or "not recorded",
        "versions": ", ".join(f"{name} {'/'.join(values)}" for name, values in versions.items()),
        "started": f"{started[0]} to {started[-1]}" if started else "not recorded",
        "training time": f"{wall.sum() / 60:.1f} min in all, longest run {wall.max() / 60:.1f} min",
        "peak memory": f"{peak:.0f} MiB a process" if math.isfinite(peak) else "not recorded",
    }


def _doubts(metrics: Metrics) -> list[str]:
    """What makes the runs hard to reproduce or to compare, one sentence each; empty if nothing does."""
    versions = len({run.get("code_hash") for run in metrics.runs})
    dirty = sum(bool(run.get("git_dirty")) for run in metrics.runs)
    n = len(metrics.runs)
    starts: dict[str, dict[tuple, set[float]]] = {}
    for run in metrics.runs:
        of, success = _warm_start(run)
        starts.setdefault(run["regime"], {}).setdefault(of, set()).add(success)
    unlike = {regime: sum(len(s) > 1 for s in of.values()) for regime, of in starts.items()}
    doubts = []
    if versions > 1:
        doubts.append(f"The {n} runs were trained by {versions} different versions of the code.")
    if dirty:
        doubts.append(f"{dirty} of {n} runs were trained from a tree with uncommitted changes.")
    if again := [f"{n} of {len(starts[regime])} in {regime}" for regime, n in unlike.items() if n]:
        doubts.append(
            f"Warm starts were made more than once, with different weights ({', '.join(again)}): runs paired across these "
            "share world, seed and order of questions, but not the policy they began from."
        )
    return doubts


def _warm_start(run: schema.RunRecord) -> tuple[tuple, float]:
    """Which warm start a run of its regime began from, and its success: all runs of one share its weights, so another
    success betrays other weights."""
    of = run["regime"], run["world_seed"], run["warm_start_seed"], run.get("policy")
    return of, run["warm_start"]["success_sampled"]


def _starts(metrics: Metrics) -> list[dict[str, Any]]:
    """Where a regime's warm starts were made more than once: per time success by warm start, machines, and arms of the runs
    that began from them; no rows where none were."""
    made: dict[tuple, list[float]] = {}
    times: dict[tuple[str, int], list[schema.RunRecord]] = {}
    for run in sorted(metrics.runs, key=lambda run: str(run.get("started"))):
        of, success = _warm_start(run)
        if success not in made.setdefault(of, []):
            made[of].append(success)
        times.setdefault((run["regime"], made[of].index(success) + 1), []).append(run)
    again = {regime for regime, time in times if time > 1}
    rows = []
    for (regime, time), runs in sorted(times.items()):
        if regime in again:
            counts = pd.Series([run["algorithm"] for run in runs]).value_counts()
            successes = {run["warm_start_seed"]: run["warm_start"]["success_sampled"] for run in runs}
            machines = _distinct([run.get("hardware", {}).get("platform") for run in runs])
            rows.append(
                {
                    "regime": regime,
                    "time": time,
                    "runs": len(runs),
                    "successes": ", ".join(f"{seed}: {s:.3f}" for seed, s in sorted(successes.items())),
                    "machines": "; ".join(machines) or "not recorded",
                    "arms": ", ".join(f"{name} ({counts[name]})" for name in in_order(counts.index)),
                    "n_arms": len(counts),
                }
            )
    return rows


def _machine(hardware: dict[str, Any]) -> str | None:
    if not hardware:
        return None
    memory = f", {hardware['memory_gib']} GiB" if hardware.get("memory_gib") else ""
    return f"{hardware.get('cpu')}, {hardware.get('cores')} cores{memory}, {hardware.get('gpu') or 'no GPU'}"


def _rows(metrics: Metrics, reference: Metrics | None) -> list[dict[str, Any]]:
    """The result table, each row with the reference's row for the same regime and algorithm, if any."""
    other = {}
    if reference:
        other = {(r["regime"], r["algorithm"]): r for r in reference.table.to_dict("records")}
    rows = metrics.table.to_dict("records")
    order = {name: i for i, name in enumerate(in_order(metrics.algorithms()))}
    rows.sort(key=lambda row: (row["regime"], order[row["algorithm"]]))
    return [
        {
            **row,
            "look": look(row["algorithm"]),
            "side": _is_side(row),
            "reference": other.get((row["regime"], row["algorithm"])),
        }
        for row in rows
    ]


def _is_side(row: dict[str, Any]) -> bool:
    """Whether a row is an ablation or a cell of the study, whose place is a figure rather than the first table."""
    return row["regime"] in COVERED or variant(row["algorithm"]) is not None


def _table(file: Path) -> list[dict[str, Any]]:
    """Rows of a table that the evaluation wrote; none where it did not."""
    return pd.read_csv(file, keep_default_na=False).to_dict("records") if file.is_file() else []


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def _sensitivity(file: Path) -> list[dict[str, Any]]:
    """Collapses by other lines of the rule, of the arms of the first table."""
    return [{**row, "look": look(row["algorithm"])} for row in _table(file) if not _is_side(row)]


def _claims(folder: Path, sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Verdicts with the section of their figure, if the page has it."""
    rows = []
    for row in _table(folder / CSV_FILE):
        numbers = {
            name: math.nan if row[name] == "" else float(row[name]) for name in ("value", "low", "high")
        }
        counts = [(int(n), int(of or 0)) for n, of in re.findall(r" (\d+)(?: of (\d+))?(?=,|$)", row["runs"])]
        recorded, planned = (sum(column) for column in zip(*counts, strict=True))
        n_runs = f"{recorded} of {planned}" if " of " in row["runs"] else str(recorded)
        provisional = str(row["provisional"]) == "True"
        section = _section_of(row["figure"], sections)
        rows.append({**row, **numbers, "n_runs": n_runs, "provisional": provisional, "section": section})
    return rows


def _section_of(figure: str, sections: list[dict[str, Any]]) -> str | None:
    return next(
        (section["name"] for section in sections if figure in (section["name"], section["kind"])), None
    )


def _tally(claims: list[dict[str, Any]]) -> str:
    """How many primary verdicts came out how."""
    primary = [row["verdict"] for row in claims if row["kind"] == "primary"]
    counts = {
        verdict: primary.count(verdict) for verdict in (SUPPORTED, NOT_SUPPORTED, INCONCLUSIVE, NOT_TESTED)
    }
    early = sum(row["provisional"] for row in claims if row["kind"] == "primary")
    return (
        f"Of {len(primary)} primary verdicts: "
        + ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        + (f"; {early} of them {PROVISIONAL}." if early else ".")
    )


def _origin(metrics: Metrics, tuning: Metrics | None) -> str:
    """How the regimes that provoke collapse were chosen. tuning: token PPO's runs by which the main one was."""
    if MAIN in metrics.regimes:
        return (
            f"The learning rate of regime {MAIN} was chosen blind, by token PPO alone, on tuning seeds, a world and warm starts "
            "that are never reported, as the one whose share of collapsed runs came nearest to 0.8 "
            "(results/reference/study/PROTOCOL.md): that token PPO collapses there is therefore by selection; what the other "
            "algorithms do is not." + (f" {_tried(tuning)}" if tuning else "")
        )
    return (
        "The learning rates of the regimes were chosen on a tuning seed that is not reported, by what token PPO did there (see "
        "configs/training): that token PPO collapses in the off-policy regimes is therefore by selection; what the other "
        "algorithms do is not."
    )


def _tried(tuning: Metrics) -> str:
    """Token PPO's collapses at every learning rate that was tried: how near an edge the chosen one stands."""
    shares = collapse_shares(tuning)
    rates = tuning.iterations.groupby("regime")["learning_rate"].max().sort_values()
    runs = pd.Series([run["regime"] for run in tuning.runs]).value_counts()
    tried = [
        f"{short(rate)}: {round(shares[regime] * runs[regime])} of {runs[regime]}"
        for regime, rate in rates.items()
    ]
    return f"Its collapses there by learning rate, which show how near an edge the regime stands: {', '.join(tried)}."


def _repeated(metrics: Metrics, again: Metrics | None) -> str | None:
    """What runs owe to rounding: the same numbers on another processor, from warm starts made again there."""
    if again is None:
        return None
    pairs = again.collapses.keys() & metrics.collapses.keys()
    finals = [m.summary.set_index(KEYS)["success_final"] for m in (metrics, again)]
    told = []
    for regime, algorithm in sorted({key[:2] for key in pairs}):
        of = sorted(key for key in pairs if key[:2] == (regime, algorithm))
        first, second = ([m.collapses[key].collapsed for key in of] for m in (metrics, again))
        alike = sum(a == b for a, b in zip(first, second, strict=True))
        apart = fmean(abs(finals[0][key] - finals[1][key]) for key in of)
        told.append(
            f"{look(algorithm).label} collapsed in {words.share(sum(second), len(of))} ({sum(first)} the first time, the same "
            f"run by run in {alike}), final success {words.number(apart)} apart on average"
        )
    return (
        f"Run again on another processor, from warm starts made again there: {'; '.join(told)}."
        if told
        else None
    )


def _versions(metrics: Metrics) -> list[tuple[str, str, int]]:
    """Which version of the code trained which arms: hash, arms by regime, number of runs; in the order of first use."""
    runs = pd.DataFrame(metrics.runs).reindex(columns=["code_hash", "started", "regime", "algorithm"])
    rows = []
    for version, part in runs.sort_values("started").groupby("code_hash", sort=False, dropna=False):
        regimes = [
            f"{regime} ({', '.join(in_order(arms['algorithm']))})" for regime, arms in part.groupby("regime")
        ]
        rows.append((str(version), "; ".join(regimes), len(part)))
    return rows


def _notebooks(results_dir: Path, out_file: Path) -> dict[str, list[tuple[str, str]]]:
    """Executed notebooks below the results folder, as group -> (title, relative link)."""
    groups: dict[str, list[tuple[str, str]]] = {
        "Derivations, in reading order": [],
        "Figures": [],
        "Training runs": [],
    }
    for path in sorted(results_dir.rglob("*.html")):
        if path.resolve() == out_file.resolve():
            continue
        name = path.relative_to(results_dir).with_suffix("").as_posix()
        if "/" in name or path.stem.startswith("10-"):
            group, title = "Training runs", name
        else:
            group = "Derivations, in reading order" if path.stem.startswith("0") else "Figures"
            title = _title(path.with_suffix(".ipynb")) or name
        groups[group].append((title, Path(os.path.relpath(path, out_file.parent)).as_posix()))
    return {group: links for group, links in groups.items() if links}


def _title(notebook: Path) -> str | None:
    """A notebook's first heading, or None where there is no notebook or it has none."""
    if not notebook.is_file():
        return None
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    lines = [
        line
        for cell in cells
        if cell["cell_type"] == "markdown"
        for line in "".join(cell["source"]).splitlines()
    ]
    return next((line.lstrip("# ").strip() for line in lines if line.startswith("# ")), None)


def _find_reference(reference_dir: Path | None) -> Path | None:
    """The reference folder, or the laptop one beside it: a preset may have no reference of its own."""
    if reference_dir is None:
        return None
    for folder in (reference_dir, reference_dir.parent / FALLBACK_PRESET):
        if (folder / METRICS / schema.RUNS_FILE).is_file():
            return folder
    return None


def _number(value: Any, digits: int = 2) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def render_report(results_dir: str | Path, reference_dir: str | Path | None, out_file: str | Path) -> Path:
    """Write the report of `results_dir` (holding metrics/ and figures/) to `out_file`, which it returns.

    `reference_dir` is `results/reference/<preset>`; where it does not exist the laptop reference
    beside it stands in, and the page says so. The page needs no other file and no network, save
    the links to executed notebooks, which are relative. Errors are those of `load_metrics`.
    """
    results_dir, out_file = Path(results_dir), Path(out_file)
    registered = Path(reference_dir) if reference_dir and (Path(reference_dir) / PROTOCOL).is_file() else None
    tuning = load_metrics(registered / TUNING) if registered and (registered / TUNING).is_dir() else None
    again = load_metrics(registered / AGAIN) if registered and (registered / AGAIN).is_dir() else None
    reference = _find_reference(Path(reference_dir) if reference_dir else None)
    metrics = load_metrics(results_dir / METRICS)
    reference_metrics = load_metrics(reference / METRICS) if reference else None
    committed = reference_metrics is not None and reference_metrics.runs == metrics.runs
    whose = "committed runs" if committed else "your run"
    if committed:  # the page would show everything twice
        reference = reference_metrics = None
    sections = figure_sections(results_dir / FIGURES, reference / FIGURES if reference else None)
    claims = _claims(results_dir / CLAIMS, sections)
    answers = [
        {**row, "section": _section_of(row["figure"], sections), "see": row["see"].split()}
        for row in _table(results_dir / CLAIMS / ANSWERS_FILE)
    ]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    page = environment.get_template("report.html.j2").render(
        preset=results_dir.name,
        reference_preset=reference.name if reference else None,
        provenance=_provenance(metrics),
        reference_provenance=_provenance(reference_metrics) if reference_metrics else None,
        doubts={
            whose.capitalize(): _doubts(metrics),
            "Reference": _doubts(reference_metrics) if reference_metrics else [],
        },
        rows=_rows(metrics, reference_metrics),
        spacings=sorted({f"{v.spacing:g}" for v in metrics.collapses.values() if math.isfinite(v.spacing)}),
        runs=metrics.runs,
        starts=_starts(metrics),
        whose=whose,
        committed=committed,
        claims=claims,
        tally=_tally(claims),
        in_short=_lines(results_dir / CLAIMS / SUMMARY_FILE),
        answers=answers,
        coverage=_table(results_dir / CLAIMS / COVERAGE_FILE),
        sensitivity=_sensitivity(results_dir / CLAIMS / SENSITIVITY_FILE),
        origin=_origin(metrics, tuning),
        repeated=_repeated(metrics, again),
        protocol=(registered / PROTOCOL).as_posix() if registered else None,
        setting=describe_setting(metrics),
        is_study=MAIN in metrics.regimes,
        versions=_versions(metrics),
        sections=sections,
        notebooks=_notebooks(results_dir, out_file),
        names=_names(results_dir / FIGURES, reference / FIGURES if reference else None),
        glossary=schema.GLOSSARY,
    )
    write_atomically(out_file, lambda path: path.write_text(page, encoding="utf-8"))
    return out_file
