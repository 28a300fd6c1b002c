import re

from stppo.record import schema


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
