"""One self-contained HTML page: what was run, what came out, beside the committed reference."""

from __future__ import annotations

import base64
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stppo import schema
from stppo.analysis.runs import Metrics, load_metrics
from stppo.analysis.style import in_order, look
from stppo.files import write_atomically

METRICS, FIGURES, OBJECTIVES = "metrics", "figures", "objectives"
FALLBACK_PRESET = "laptop"

# File name (or its part before the regime) -> heading and the question the figure asks.
HEADINGS: dict[str, tuple[str, str]] = {
    OBJECTIVES: (
        "Objectives",
        "What tells the algorithms apart? (a schematic, drawn from their configs; asks what the paper's fig. 1 shows)",
    ),
    "overview": ("Every algorithm", "Which algorithms learn, and which lose what they had learned?"),
    "collapse": (
        "Token PPO, seed by seed",
        "Does token-level PPO fail, and what moves when it does? (asks what the paper's fig. 2 asks)",
    ),
    "diagnostics": (
        "Diagnostics",
        "Do gradient norm and clipping bias grow, and for which variant? (fig. 3 a-d)",
    ),
    "stability": ("Stability", "Do the stabilised variants keep learning where token PPO fails? (fig. 4)"),
    "clip_ratio": ("Clipping", "How much is clipped, and how far does the policy move? (fig. 5)"),
    "so_grpo": (
        "Group-based variants",
        "Do the same ideas carry over to GRPO? (asked by the second version)",
    ),
    "granularity": ("Granularity", "Does a coarser importance ratio help by itself?"),
}


@dataclass(frozen=True)
class Picture:
    """One figure of one results folder."""

    src: str  # data URI
    caption: str


def _picture(figures_dir: Path, name: str) -> Picture | None:
    for extension, mime in (("png", "image/png"), ("svg", "image/svg+xml")):
        path = figures_dir / f"{name}.{extension}"
        if path.is_file():
            caption = figures_dir / f"{name}.txt"
            text = caption.read_text(encoding="utf-8").strip() if caption.is_file() else ""
            return Picture(f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}", text)
    return None


def _figure_names(*folders: Path | None) -> list[str]:
    """Names of the figures in any of the folders: known ones in the order of HEADINGS, others behind."""
    found = {path.stem for folder in folders if folder for path in folder.glob("*.png")}
    ranks = {name: i for i, name in enumerate(HEADINGS)}
    return sorted(found, key=lambda name: (ranks.get(_kind(name), len(ranks)), name))


def _kind(name: str) -> str:
    """The figure's entry in HEADINGS: `diagnostics_A` is of kind `diagnostics`."""
    return next((kind for kind in HEADINGS if name == kind or name.startswith(f"{kind}_")), name)


def _sections(own: Path, reference: Path | None) -> list[dict[str, Any]]:
    sections = []
    for name in _figure_names(own, reference):
        kind = _kind(name)
        heading, question = HEADINGS.get(kind, (name.replace("_", " ").capitalize(), ""))
        if name != kind:
            heading = f"{heading}, regime {name.removeprefix(f'{kind}_')}"
        mine, theirs = _picture(own, name), _picture(reference, name) if reference else None
        sections.append(
            {
                "name": name,
                "heading": heading,
                "question": question,
                "own": mine,
                "reference": None if theirs == mine else theirs,  # the schematic needs no run: one is enough
                "same": mine is not None and theirs == mine,
            }
        )
    return sections


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
    doubts = []
    if versions > 1:
        doubts.append(f"The {n} runs were trained by {versions} different versions of the code.")
    if dirty:
        doubts.append(f"{dirty} of {n} runs were trained from a tree with uncommitted changes.")
    return doubts


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
        {**row, "look": look(row["algorithm"]), "reference": other.get((row["regime"], row["algorithm"]))}
        for row in rows
    ]


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
    reference = _find_reference(Path(reference_dir) if reference_dir else None)
    metrics = load_metrics(results_dir / METRICS)
    reference_metrics = load_metrics(reference / METRICS) if reference else None
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
            "Your run": _doubts(metrics),
            "Reference": _doubts(reference_metrics) if reference_metrics else [],
        },
        rows=_rows(metrics, reference_metrics),
        spacings=sorted({f"{v.spacing:g}" for v in metrics.collapses.values() if math.isfinite(v.spacing)}),
        runs=metrics.runs,
        sections=_sections(results_dir / FIGURES, reference / FIGURES if reference else None),
        notebooks=_notebooks(results_dir, out_file),
        names=_names(results_dir / FIGURES, reference / FIGURES if reference else None),
        glossary=schema.GLOSSARY,
    )
    write_atomically(out_file, lambda path: path.write_text(page, encoding="utf-8"))
    return out_file
