"""A table of any finished runs: how each variant started, learned and ended, sampled and greedy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from stppo.config.provenance import torches
from stppo.files import parse_json, printable
from stppo.record import schema
from stppo.record.runs import together, told_apart
from stppo.record.tidy import KEYS
from stppo.stats import with_intervals

MEASURES = ("start", "final", "auc", "highest")
KINDS = ("sampled", "greedy")
STATISTICS = ("mean", "min", "max")
COLUMNS = {  # of `Metrics.summary`
    **{"start": "start_sampled", "final": "final_sampled", "area": "auc_sampled"},
    **{"greedy_start": "start_greedy", "greedy_final": "final_greedy", "greedy_area": "auc_greedy"},
}


def find_runs(folders: Iterable[str | Path]) -> list[Path]:
    """Run and metrics folders, sorted: each given one, or else the runs below it, or else the metrics folders
    below it.

    What a run set aside does not count. FileNotFoundError names a folder that holds none.
    """
    found: set[Path] = set()
    for folder in map(Path, folders):
        for files in (
            [file for name in (schema.RUN_FILE, schema.RUNS_FILE) for file in folder.glob(name)],
            folder.rglob(schema.RUN_FILE),
            folder.rglob(schema.RUNS_FILE),
        ):
            here = {f.parent for f in files if not schema.is_set_aside(f, folder)}
            if here:
                found |= here
                break
        else:
            raise FileNotFoundError(
                f"{folder} holds no {schema.RUN_FILE} or {schema.RUNS_FILE}; give folders of runs"
            )
    return sorted(found)


def compare_runs(folders: Iterable[str | Path]) -> pd.DataFrame:
    """One row per regime, algorithm and variant, best final sampled success first.

    Columns: `regime`, `algorithm`, `variant` (the overrides that not all runs of the regime share), `seeds`,
    `iterations` (their number, or the least and the greatest),
    and for each of `MEASURES`, `KINDS` and `STATISTICS` over seeds one such as `final_greedy_mean`: success
    of the warm start; mean of the last tenth of the evaluations; mean height of the curve; highest
    evaluation. As in `Metrics.summary` a run that ended in a number that is not finite counts as 0 from there
    to the longest run of its regime. Unfinished runs are left out; `attrs["unfinished"]` names them,
    `attrs["non_finite"]` those that such a number ended,
    `attrs["lengths"]` and `attrs["torch"]` say where finished runs differ in length and in torch's release,
    `attrs["asked"]` what the numbers rest on.
    ValueError if no run is finished or one is given twice; other errors are those of `find_runs` and
    `runs.read_run`.
    """
    found = find_runs(folders)
    unfinished = [folder for folder in found if _is_unfinished(folder)]
    if len(unfinished) == len(found):
        raise ValueError(f"no finished run among {', '.join(map(str, unfinished))}")
    metrics = together([folder for folder in found if folder not in unfinished])
    greedy = (metrics.evaluations["temperature"] == 0).rename("kind").map({True: KINDS[1], False: KINDS[0]})
    highest = metrics.evaluations.groupby([*KEYS, greedy])["success"].max().unstack("kind")
    each = metrics.summary.rename(columns=COLUMNS).join(highest.add_prefix("highest_"), on=KEYS)
    each["iterations"] = [record["iterations"] for record in metrics.runs]
    each["samples"] = [record["warm_start"].get("n_sampled") for record in metrics.runs]
    apart = pd.DataFrame(told_apart(metrics.runs), columns=["algorithm", "variant"], index=each.index)
    groups = each.assign(**apart).groupby(["regime", "algorithm", "variant"], sort=False)
    columns = [f"{measure}_{kind}" for kind in KINDS for measure in MEASURES]
    table = groups[columns].agg(list(STATISTICS))
    table.columns = ["_".join(names) for names in table.columns]
    table.insert(0, "seeds", groups.size())
    table.insert(1, "iterations", groups["iterations"].agg(_span))
    table = table.reset_index().sort_values(
        ["regime", "final_sampled_mean"], ascending=[True, False], kind="stable", ignore_index=True
    )
    broken = each[each["status"] == schema.NON_FINITE]
    table.attrs["non_finite"] = ["/".join(map(str, run)) for run in broken[KEYS].itertuples(index=False)]
    table.attrs["unfinished"] = [str(folder) for folder in unfinished]
    ended = each.loc[each["status"] == "completed", "iterations"]
    table.attrs["lengths"] = f"runs of {_span(ended)} iterations" if ended.nunique() > 1 else ""
    made_with = torches(metrics.runs)
    table.attrs["torch"] = f"runs made with torch {', '.join(made_with)}" if len(made_with) > 1 else ""
    table.attrs["asked"] = (
        f"start: the warm start, on {_span(each['samples'])} samples; "
        f"the others: evaluations, on {_span(metrics.evaluations['n_questions'])} questions"
    )
    return table


def _span(numbers: pd.Series) -> str:
    """The number that all are, or the least and the greatest."""
    return "-".join(dict.fromkeys(f"{n:.0f}" for n in (numbers.min(), numbers.max())))


def _is_unfinished(folder: Path) -> bool:
    try:
        return parse_json((folder / schema.RUN_FILE).read_bytes())["status"] == schema.RUNNING
    except (OSError, ValueError, KeyError, TypeError):
        return False  # reading it says what is wrong


def text(table: pd.DataFrame) -> str:
    """The table for a terminal of 100 columns: means, the range of final success where there are several
    seeds, and at the end of a line, where it may be long, the name."""
    width = 12 if (table["seeds"] > 1).any() else 0  # of the range
    lines = [
        f"{'sampled':<{24 + width}}greedy",
        f"start  final {'':<{width}}  auc   top start final  auc   top seeds iters algorithm",
    ]
    for row in table.to_dict("records"):
        cells = []
        for kind in KINDS:
            for measure in MEASURES:
                low, mean, high = (
                    row[f"{measure}_{kind}_{statistic}"] for statistic in ("min", "mean", "max")
                )
                cells.append(f"{'-':>5}" if pd.isna(mean) else f"{mean:5.2f}")
                if (measure, kind) == ("final", "sampled"):
                    shown = f"[{low:.2f}, {high:.2f}]" if row["seeds"] > 1 else ""
                    cells.append(f"{shown:<{width}}")
        name = printable(" ".join(filter(None, (row["regime"], row["algorithm"], row["variant"]))))
        lines.append(f"{' '.join(cells)} {row['seeds']:>5} {row['iterations']:>5} {name}")
    return "\n".join([*lines, table.attrs["asked"]])


def before_and_after(evaluations: pd.DataFrame) -> str | None:
    """One line on a run's evaluations (`schema.EVALUATION_COLUMNS`): success of the first and the last,
    sampled and greedy, each with its interval over questions. None where there are none."""
    if evaluations.empty:
        return None
    parts = []
    for kind in KINDS:
        rows = evaluations[(evaluations["temperature"] == 0) == (kind == "greedy")].sort_values("iteration")
        ends = with_intervals(rows.iloc[sorted({0, len(rows) - 1})] if len(rows) else rows, "success")
        shown = [f"{end.success:.2f} [{end.low:.2f}, {end.high:.2f}]" for end in ends.itertuples()]
        parts += [f"{kind} {' to '.join(shown)}"] if shown else []
    return (
        f"success on {evaluations['n_questions'].iloc[-1]} unseen questions, before and after [95 % Wilson "
        f"interval]: {', '.join(parts)}"
    )
