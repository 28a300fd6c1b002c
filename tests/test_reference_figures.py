"""Committed pictures say and hold what the code draws from the committed metrics (the first study's, whose
code is an older commit's, apart)."""

from io import StringIO
from pathlib import Path

import pandas as pd
import pytest

from stppo.derivations.axes import objectives_figure
from stppo.figures import figures
from stppo.figures.style import words_of
from stppo.record.runs import load_metrics
from stppo.study import divisor, starving, thousand
from stppo.study import figures as study
from stppo.study.benchmark import leaderboard
from stppo.study.benchmark_figures import pictures
from stppo.study.questions import questions_figure

REFERENCE = Path(__file__).parents[1] / "results/reference"
DRAWN = {name: kind.draw for name, kind in (figures.FIGURES | study.FIGURES).items()} | {
    "objectives": lambda metrics: objectives_figure(),
    "questions": questions_figure,
    "starving": lambda metrics: starving.picture(
        metrics, pd.read_csv(REFERENCE / "starving" / starving.BY_HOPS)
    ),
    **{
        name: lambda metrics, draw=draw: draw(metrics, pd.read_csv(REFERENCE / "divisor" / divisor.CLAIMS))
        for name, draw in (("divisor", divisor.picture), ("width", divisor.width_picture))
    },
    "thousand": thousand.picture,
}
FOLDERS = sorted(folder for kind in ("figures", "claims") for folder in REFERENCE.rglob(kind))
# The others' pictures are drawn with their pages, below or in their own tests.
RECORDS = sorted(
    {str(folder.parent.relative_to(REFERENCE)) for folder in FOLDERS} - {"study", "benchmark", "first_study"}
)


def committed(name):
    """A record's pictures."""
    return sorted(
        file for folder in ("figures", "claims") for file in (REFERENCE / name / folder).glob("*.png")
    )


def is_drawn(plot, file):
    assert words_of(file) == (plot.title, plot.caption)
    for suffix, table in {"": plot.data, **{f"_{key}": of for key, of in plot.tables.items()}}.items():
        again = pd.read_csv(StringIO(table.to_csv(index=False, float_format="%.6g")))
        was = pd.read_csv(file.with_name(f"{file.stem}{suffix}.csv"))
        pd.testing.assert_frame_equal(again, was, rtol=1e-4)


@pytest.mark.parametrize("name", [*RECORDS, pytest.param("study", marks=pytest.mark.slow)])
def test_pictures_are_those_of_the_code(name):
    metrics, files = load_metrics(REFERENCE / name / "metrics"), committed(name)
    assert files
    for file in files:
        is_drawn(DRAWN[file.stem](metrics), file)


def test_pictures_of_the_benchmark_are_those_of_the_code():
    metrics = load_metrics(REFERENCE / "benchmark/metrics")
    plots = {plot.name: plot for plot in pictures(metrics, leaderboard(metrics))}
    files = committed("benchmark")
    assert [file.stem for file in files] == sorted(plots)
    for file in files:
        is_drawn(plots[file.stem], file)


def test_vector_and_text_files_are_made_by_the_pipeline_and_not_kept():
    assert not [file for folder in FOLDERS for file in folder.iterdir() if file.suffix in (".svg", ".txt")]
