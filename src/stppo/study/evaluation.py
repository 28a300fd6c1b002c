"""Everything that a study concludes, as tables beside its metrics: verdicts, answers, what was run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd

from stppo.files import write_atomically
from stppo.results.runs import load_metrics
from stppo.study.answers import all_answers
from stppo.study.claims import evaluate, write_ledger
from stppo.study.comparisons import coverage, load_plan
from stppo.study.in_short import in_short
from stppo.study.outcomes import Study
from stppo.study.sensitivity import collapse_counts

ANSWERS_FILE, COVERAGE_FILE, SENSITIVITY_FILE = "answers.csv", "coverage.csv", "sensitivity.csv"
SUMMARY_FILE = "in_short.txt"


def write_evaluation(
    metrics_dir: str | Path, out_dir: str | Path, planned: str | Path | None = None
) -> list[Path]:
    """Write claims.csv, claims.md, answers.csv, coverage.csv, sensitivity.csv and in_short.txt; returns the paths.

    planned: file of `comparisons.load_plan`; without it nothing is said of what was to be run.
    """
    metrics, plan = load_metrics(metrics_dir), load_plan(planned)
    study = Study(metrics)
    answers = pd.DataFrame(
        [[a.id, a.question, a.text, a.figure, " ".join(a.see)] for a in all_answers(study, plan)],
        columns=["id", "question", "answer", "figure", "see"],
    )
    paths = write_ledger(evaluate(metrics, planned=plan), out_dir)
    tables = {
        ANSWERS_FILE: answers,
        COVERAGE_FILE: coverage(metrics, plan),
        SENSITIVITY_FILE: collapse_counts(metrics),
    }
    for name, table in tables.items():
        paths.append(Path(out_dir) / name)
        text = table.to_csv(index=False, lineterminator="\n")
        write_atomically(paths[-1], partial(Path.write_text, data=text, encoding="utf-8"))
    paths.append(Path(out_dir) / SUMMARY_FILE)
    text = "".join(f"{sentence}\n" for sentence in in_short(study))
    write_atomically(paths[-1], partial(Path.write_text, data=text, encoding="utf-8"))
    return paths
