"""One self-contained HTML page: what was trained, what came out, beside the committed reference."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stppo.figures.figures import FIGURES
from stppo.figures.style import words_of
from stppo.files import write_atomically
from stppo.record import schema
from stppo.record.compare import before_and_after
from stppo.record.runs import Metrics, load_metrics

METRICS, FIGURE_FOLDER, OWN_FOLDER, CLAIMS = "metrics", "figures", "own", "claims"
CLAIM_COLUMNS = ("id", "claim", "measured", "estimate", "low", "high", "threshold", "worlds", "verdict")
UNFOLDED = ("learning", "clip_ratio")  # shown before anything is unfolded, in this order
FEW = 12  # runs up to which each one's success before and after is told with its intervals over questions
OTHERS = "more"  # group of figures that the registry does not know: the study's and a reader's own


# ---- figures ------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Picture:
    """One figure of one results folder."""

    src: str  # data URI
    title: str  # which is drawn; empty if it states none
    caption: str
    link: str  # to its vector file or, without one, to itself; relative to the report
    data: str  # to its numbers, likewise


@dataclass(frozen=True)
class Section:
    """One figure of the page: of the runs shown, of the reference, or of both."""

    name: str
    group: str
    own: Picture | None
    reference: Picture | None

    @property
    def heading(self) -> str:
        return self.name.replace("_", " ").capitalize()


def _picture(folder: Path | None, name: str, page: Path) -> Picture | None:
    file = folder / f"{name}.png" if folder else None
    if file is None or not file.is_file():
        return None
    vector = file.with_suffix(".svg")  # the committed reference has none
    shown, link = (
        Path(os.path.relpath(of, page.parent)) for of in (vector if vector.is_file() else file, file)
    )
    title, caption = (" ".join(words.split()) for words in words_of(file))
    return Picture(
        src=f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}",
        title=title,
        caption=caption,
        link=shown.as_posix(),
        data=link.with_suffix(".csv").as_posix(),
    )


def figure_sections(own: Sequence[Path], reference: Path | None, page: Path) -> list[Section]:
    """Every figure of the folders: in the order of `FIGURES`, a reader's own behind, by name."""
    mine_in = {file.stem: folder for folder in reversed(own) for file in folder.glob("*.png")}
    found = {*mine_in, *(file.stem for file in (reference.glob("*.png") if reference else ()))}
    order = [*FIGURES, *sorted(found - set(FIGURES))]
    sections = []
    for name in (name for name in order if name in found):
        mine, theirs = _picture(mine_in.get(name), name, page), _picture(reference, name, page)
        if mine and theirs and mine.src == theirs.src:
            theirs = None  # a schematic needs no run: once is enough
        group = FIGURES[name].group if name in FIGURES else OTHERS
        sections.append(Section(name, group, mine, theirs))
    return sections


def _by_group(sections: Iterable[Section]) -> dict[str, list[Section]]:
    groups: dict[str, list[Section]] = {}
    for section in sections:
        groups.setdefault(section.group, []).append(section)
    return groups


# ---- tables -------------------------------------------------------------------------------------
def summary_lines(metrics: Metrics) -> list[str]:
    """What was run and what came of it, a line each."""
    summary, table = metrics.summary, metrics.table
    n, worlds = len(summary), summary["world_seed"].nunique()
    iterations = _span([run["iterations"] for run in metrics.runs])
    samples = [had for run in metrics.runs if (had := run["warm_start"].get("n_sampled"))]
    on = f" ({_span(samples, ',')} samples)" if samples else ""
    policies = ", ".join(_distinct(run.get("policy") for run in metrics.runs))
    lines = [
        f"{_count(n, 'run')}: {_count(summary['algorithm'].nunique(), 'algorithm')}, "
        f"{_count(worlds, 'world')}, {iterations} iterations, {policies} policy.",
        f"Success at the start: {_span(summary['start'], '.2f')} sampled{on}, "
        f"{_span(summary['greedy_start'], '.2f')} greedy. Each later evaluation: "
        f"{_span(metrics.evaluations['n_questions'], ',')} questions.",
        f"{summary['learned'].sum()} of {n} learned, {summary['crash_iteration'].count()} crashed, "
        f"{summary['collapsed'].sum()} collapsed.",
    ]
    if len(table) > 1:
        best, worst = table.loc[table["final"].idxmax()], table.loc[table["final"].idxmin()]
        lines.append(
            f"Final success: highest {best['final']:.2f} ({_arm(best, metrics)}), lowest "
            f"{worst['final']:.2f} ({_arm(worst, metrics)})."
        )
    return lines


def _arm(row: pd.Series, metrics: Metrics) -> str:
    return row["label"] if len(metrics.regimes) == 1 else f"{row['label']}, {row['regime']}"


def _rows(metrics: Metrics, reference: Metrics | None) -> list[dict[str, Any]]:
    """`Metrics.table` with each row's colour and, if there is one, the reference's row of that regime and
    algorithm; the regime with most algorithms first."""
    theirs = reference.table.to_dict("records") if reference else []
    other = {(row["regime"], row["algorithm"]): row for row in theirs}
    main = metrics.main.runs["regime"].iloc[0]
    rows = sorted(metrics.table.to_dict("records"), key=lambda row: row["regime"] != main)
    return [
        row
        | {"look": metrics.look(row["algorithm"]), "reference": other.get((row["regime"], row["algorithm"]))}
        for row in rows
    ]


def _runs(metrics: Metrics, results_dir: Path, page: Path) -> list[dict[str, Any]]:
    """Every run: its line of the summary, learning rate and, if it lies there, its executed notebook."""
    rows = []
    for record, row in zip(metrics.runs, metrics.summary.to_dict("records"), strict=True):
        folder = results_dir / "runs" / row["regime"] / row["algorithm"] / f"seed{row['seed']}"
        notebook = folder / "10-train.html"
        link = Path(os.path.relpath(notebook, page.parent)).as_posix() if notebook.is_file() else None
        rows.append(row | {"learning_rate": metrics.settings(record)["learning_rate"], "link": link})
    return rows


def _ends(metrics: Metrics) -> list[tuple[str, str]]:
    """Each run's name, and its success before and after with intervals over questions, which one run alone
    can have."""
    told = (before_and_after(metrics.select(metrics.evaluations, record)) for record in metrics.runs)
    names = (f"{metrics.look(record['algorithm']).label}, seed {record['seed']}" for record in metrics.runs)
    return [(name, line) for name, line in zip(names, told, strict=True) if line]


# ---- provenance ---------------------------------------------------------------------------------
def provenance(metrics: Metrics) -> dict[str, str]:
    """What made the runs, label -> value; values that differ between runs are all listed."""
    runs = [part for run in metrics.runs for part in (run, *(run.get("resumed_on") or ()))]
    commits = [commit[:12] for commit in _distinct(run.get("git_commit") for run in runs)]
    made_with = [run.get("versions") or {} for run in runs]
    versions = {
        name: _distinct(of.get(name) for of in made_with)
        for name in _distinct(n for of in made_with for n in of)
    }
    started = _distinct(run.get("started") for run in runs)
    wall = metrics.summary["wall_seconds"]
    starts = metrics.summary.drop_duplicates(["world_seed", "warm_start_seed"])
    return {
        "commit": ", ".join(commits) or "not recorded",
        "code": ", ".join(_distinct(run.get("code_hash") for run in runs)) or "not recorded",
        "versions": ", ".join(f"{name} {'/'.join(found)}" for name, found in versions.items())
        or "not recorded",
        "hardware": "; ".join(_distinct(_machine(run.get("hardware")) for run in runs)) or "not recorded",
        "started": " to ".join(dict.fromkeys([started[0], started[-1]])) if started else "not recorded",
        "training time": f"{wall.sum() / 60:.1f} min in all, longest run {wall.max() / 60:.1f} min",
        "seeds": ", ".join(map(str, sorted(set(metrics.summary["seed"])))),
        "warm starts": "; ".join(
            f"world {row.world_seed}, seed {row.warm_start_seed}: {row.start:.3f} sampled, "
            f"{row.greedy_start:.3f} greedy"
            for row in starts.itertuples()
        ),
    }


def doubts(metrics: Metrics) -> list[str]:
    """What makes the runs hard to reproduce or to compare, a line each; empty if nothing does."""
    runs = metrics.runs
    # The hash also covers the classes that an algorithm alone names, so of one commit there are several; and
    # a commit
    # that changes no code has the same one.
    commits = {(run.get("git_commit"), run.get("git_dirty")) for run in runs}
    versions = min(len({run.get("code_hash") for run in runs}), len(commits))
    dirty = sum(bool(run.get("git_dirty")) for run in runs)
    made = metrics.summary.assign(policy=[run.get("policy") for run in runs])
    # Runs of one warm start share its weights and so its success: two successes betray two sets of weights.
    again = (
        made.groupby(["regime", "world_seed", "warm_start_seed", "policy"], dropna=False)["start"].nunique()
        > 1
    ).sum()
    found = {
        f"Trained by {versions} versions of the code.": versions > 1,
        f"{dirty} of {len(runs)} runs were trained from a tree with uncommitted changes.": dirty,
        f"{_count(again, 'warm start')} made more than once, with different weights: not every pair of runs "
        "began alike.": again,
    }
    return [line for line, holds in found.items() if holds]


def _machine(hardware: dict[str, Any] | None) -> str | None:
    if not hardware:
        return None
    memory = f", {hardware['memory_gib']} GiB" if hardware.get("memory_gib") else ""
    return f"{hardware.get('cpu')}, {hardware.get('cores')} cores{memory}, {hardware.get('gpu') or 'no GPU'}"


# ---- words and links ----------------------------------------------------------------------------
def _distinct(values: Iterable[Any]) -> list[Any]:
    return sorted({value for value in values if value is not None}, key=str)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _span(values: Iterable[float], form: str = "") -> str:
    values = list(values)
    return "–".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))


def _number(value: Any, form: str = ".2f") -> str:
    return "" if value is None or pd.isna(value) else format(value, form)


def _claims(file: Path) -> pd.DataFrame:
    """Claims, what was measured of each, and verdicts, as text; empty where nothing was claimed of these
    runs."""
    if not file.is_file():
        return pd.DataFrame()
    rows = pd.read_csv(file, dtype=str, keep_default_na=False)
    return rows[[name for name in CLAIM_COLUMNS if name in rows]]


def _pages(results_dir: Path, page: Path, notebooks: Path | None) -> list[Path]:
    """Executed notebooks beside the report, by number, but for those that are gone from `notebooks`."""
    found = (file for file in sorted(results_dir.glob("*.html")) if file.resolve() != page.resolve())
    return [file for file in found if notebooks is None or (notebooks / f"{file.stem}.ipynb").exists()]


def _title(page: Path) -> str:
    """First heading of the notebook that a page was made from, without one the file's name; and whether it
    stopped."""
    notebook = page.with_suffix(".ipynb")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"] if notebook.is_file() else []
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    headings = [line.lstrip("# ").strip() for line in text.splitlines() if line.startswith("# ")]
    stopped = any(out["output_type"] == "error" for cell in cells for out in cell.get("outputs", ()))
    return (headings[0] if headings else page.stem) + " (stopped with an error)" * stopped


def render_report(
    results_dir: str | Path,
    reference_dir: str | Path | None,
    out_file: str | Path,
    notebooks: Path | None = None,
) -> Path:
    """Write the report of `results_dir` (holding metrics/ and figures/, and own/NAME/ with the figures of a
    reader's notebook) to `out_file`, which it returns.

    `reference_dir` is `results/reference/<preset>`; where it holds no metrics, or the very runs of
    `results_dir`, the page shows one set of runs only. `notebooks`: a folder whose executed notebooks alone
    are shown. The page loads nothing: links to executed notebooks, vector figures and data are relative.
    Errors are those of `load_metrics`.
    """
    results_dir, page = Path(results_dir), Path(out_file)
    metrics = load_metrics(results_dir / METRICS)
    reference, theirs = Path(reference_dir) if reference_dir else None, None
    if reference and (reference / METRICS / schema.RUNS_FILE).is_file():
        theirs = load_metrics(reference / METRICS)
    committed = theirs is not None and theirs.runs == metrics.runs
    if theirs is None or committed:
        reference = theirs = None
    pages = _pages(results_dir, page, notebooks)
    folders = [results_dir / FIGURE_FOLDER, *(results_dir / OWN_FOLDER / file.stem for file in pages)]
    sections = figure_sections(folders, reference and reference / FIGURE_FOLDER, page)
    claims = _claims(results_dir / CLAIMS / "claims.csv")
    answers = Section("questions", CLAIMS, _picture(results_dir / CLAIMS, "questions", page), None)
    shown = {section.name for section in sections}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    text = environment.get_template("report.html.j2").render(
        preset=results_dir.name,
        committed=committed,
        lines=summary_lines(metrics),
        doubts=doubts(metrics),
        rows=_rows(metrics, theirs),
        several=len(metrics.regimes) > 1,
        has_reference=theirs is not None,
        unfolded=[section for name in UNFOLDED for section in sections if section.name == name],
        folded=_by_group(section for section in sections if section.name not in UNFOLDED),
        not_drawn=[name for name in FIGURES if name not in shown],
        runs=_runs(metrics, results_dir, page),
        ends=_ends(metrics) if len(metrics.runs) <= FEW else [],
        notebooks=[(_title(file), Path(os.path.relpath(file, page.parent)).as_posix()) for file in pages],
        provenance=provenance(metrics),
        reference_provenance=provenance(theirs) if theirs else None,
        answers=answers,
        claims=claims.to_dict("records"),
        verdicts=claims.groupby("id")["verdict"].first().value_counts().to_dict() if len(claims) else {},
        glossary=schema.GLOSSARY,
    )
    write_atomically(page, lambda path: path.write_text(text, encoding="utf-8"))
    return page
