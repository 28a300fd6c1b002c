"""Committed pictures say and hold what the code draws from the committed metrics (the first study's, whose code is an older
commit's, apart)."""

from io import StringIO
from pathlib import Path

import pandas as pd
import pytest

from stppo.derivations.axes import objectives_figure
from stppo.figures.figures import FIGURES
from stppo.record.runs import load_metrics
from stppo.study.benchmark_figures import pictures
from stppo.study.questions import questions_figure

REFERENCE = Path(__file__).parents[1] / "results/reference"
DRAWN = {name: kind.draw for name, kind in FIGURES.items()} | {
    "objectives": lambda metrics: objectives_figure(),
    "questions": questions_figure,
}


def committed(name):
    """Title and caption files of a record's pictures."""
    return sorted((REFERENCE / name).glob("figures/*.txt")) + sorted((REFERENCE / name).glob("claims/*.txt"))


def is_drawn(plot, file):
    assert file.read_text(encoding="utf-8") == f"{plot.title}\n{plot.caption}\n"
    for suffix, table in {"": plot.data, **{f"_{key}": of for key, of in plot.tables.items()}}.items():
        again = pd.read_csv(StringIO(table.to_csv(index=False, float_format="%.6g")))
        pd.testing.assert_frame_equal(
            again, pd.read_csv(file.with_name(f"{file.stem}{suffix}.csv")), rtol=1e-4
        )


@pytest.mark.parametrize(
    "name",
    [
        "laptop",
        "mild",
        "search",
        "mechanism",
        "smollm_comparison",
        pytest.param("study", marks=pytest.mark.slow),
    ],
)
def test_pictures_are_those_of_the_code(name):
    metrics, files = load_metrics(REFERENCE / name / "metrics"), committed(name)
    assert files
    for file in files:
        is_drawn(DRAWN[file.stem](metrics), file)


def test_pictures_of_the_benchmark_are_those_of_the_code():
    plots = {plot.name: plot for plot in pictures(load_metrics(REFERENCE / "benchmark/metrics"))}
    files = committed("benchmark")
    assert [file.stem for file in files] == sorted(plots)
    for file in files:
        is_drawn(plots[file.stem], file)
