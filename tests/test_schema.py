import json
import re
from pathlib import Path

import pandas as pd
import pytest

from stppo.record import schema

REFERENCE = Path(__file__).parents[1] / "results/reference"


def test_every_name_is_an_identifier_with_a_one_line_text():
    for columns in schema.GLOSSARY.values():
        for name, text in columns.items():
            assert re.fullmatch(r"[a-z][a-z0-9_]*", name), name
            assert text and "\n" not in text, name


def test_peak_and_timing_columns_exist():
    assert set(schema.PEAK_COLUMNS) <= set(schema.UPDATE_COLUMNS)
    assert set(schema.TIMING_COLUMNS) <= set(schema.UPDATE_COLUMNS) | set(schema.EVALUATION_COLUMNS)


def test_every_seconds_column_is_a_timing_column():
    columns = [*schema.UPDATE_COLUMNS, *schema.EVALUATION_COLUMNS]
    assert {c for c in columns if c.startswith("seconds")} <= set(schema.TIMING_COLUMNS)


@pytest.mark.parametrize(
    "file", sorted(REFERENCE.rglob("runs.json")), ids=lambda file: str(file.parent.relative_to(REFERENCE))
)
def test_every_committed_record_is_read_by_the_model(file):
    """Those of earlier versions too, whose columns are known, means and peaks of iterations included."""
    records = json.loads(file.read_text(encoding="utf-8"))
    for n, record in enumerate(records):
        schema.check_record(record, f"{file} {n}", "nothing")
        read = schema.RunRecord.model_validate(record)
        assert (read.seed, read.warm_start.success_sampled) == (
            record["seed"],
            record["warm_start"]["success_sampled"],
        )
    known = {*schema.KEY_COLUMNS, *schema.UPDATE_COLUMNS, *(f"{name}_max" for name in schema.PEAK_COLUMNS)}
    table = file.with_name("iterations.parquet")
    assert not table.exists() or set(pd.read_parquet(table)) <= known


def test_a_row_refuses_what_is_no_column():
    row = schema.Row(schema.UPDATE_COLUMNS, {"update": 1})
    row |= {"iteration": 1}
    for write in (lambda: row.__setitem__("updat", 1), lambda: row.__ior__({"updat": 1})):
        with pytest.raises(KeyError, match="updat is no column"):
            write()
    assert row == {"update": 1, "iteration": 1}
