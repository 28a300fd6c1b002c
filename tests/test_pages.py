"""Numbers in pages are those of values.yaml, which are those of the records; links lead somewhere; commands exist."""

import re
from pathlib import Path

import pandas as pd
import pytest
import typer

from stppo.cli import app
from stppo.record.runs import load_metrics
from stppo.study import claims, divisor, pages, values

ROOT = Path(__file__).parents[1]
RECORDED = [ROOT / "README.md", *sorted((ROOT / "results/reference").glob("*/README.md"))]
MARKED = pages.marked(ROOT)
OTHER = [
    ROOT / name for name in ("CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "results/reference/README.md")
]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def committed() -> dict:
    return values.load(ROOT / "results/reference/values.yaml")


# A number without a zero before its point is a result, and is named; constants are written 0.1.
UNNAMED = re.compile(r"(?<![\w.])[−+]?\.\d+\b(?! ?%?<!-- )")


def unnamed(page: str) -> list[str]:
    """Results that no comment names, in sentences and in tables."""
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", page, flags=re.S)
    loose, columns, inside = [], [], False
    for line in text.split("\n"):
        if not line.startswith("|"):
            inside, columns = False, []
            loose += UNNAMED.findall(line)
            continue
        cells = line.split("|")
        if not inside:
            inside, columns = True, [bool(pages.COMMENT.search(cell)) for cell in cells]
            continue
        named = bool(pages.COMMENT.search(cells[1]))
        for cell, column in zip(cells, columns, strict=False):
            loose += [] if named and column else UNNAMED.findall(cell)
    return loose


def flat(found, path=""):
    """(path, number) of everything in a nested mapping or list."""
    if isinstance(found, dict | list):
        for key, part in found.items() if isinstance(found, dict) else enumerate(found):
            yield from flat(part, f"{path}.{key}")
    else:
        yield path, found


def test_values_are_those_of_the_records(committed):
    found, said = dict(flat(values.compute())), dict(flat(committed))
    assert found.keys() == said.keys(), "run `python -m stppo.study.values`"
    assert found == pytest.approx(said, abs=2e-4), "run `python -m stppo.study.values`"


def test_every_recorded_run_of_the_divisors_trial_was_planned(committed):
    found = committed["divisor"]
    asked = [found[f"question_{n}"] for n in range(2, 8)]
    assert sum(row["planned"] for row in asked) == found["planned"]
    assert sum(row["recorded"] for row in asked) == found["runs"]["part2"]


@pytest.mark.parametrize("page", MARKED, ids=name)
def test_numbers_are_the_values(page, committed):
    text = page.read_text(encoding="utf-8")
    wrong = [lines for lines in zip(text.split("\n"), pages.fill(text, committed).split("\n"), strict=True)]
    assert [said for said, found in wrong if said != found] == [], "run `python -m stppo.study.values`"


@pytest.mark.parametrize("page", [page for page in RECORDED if page.parent.name != "first_study"], ids=name)
def test_every_result_on_a_page_has_a_name(page):
    assert unnamed(page.read_text(encoding="utf-8")) == []


def test_an_edited_sentence_is_free_and_a_wrong_number_is_not():
    of = {"study": {"arm": {"final": 0.174, "low": -0.05, "high": 0.3, "share": 0.294, "runs": 1564}}}
    right = "It ended at .17<!-- study.arm.final -->, after 1,564<!-- study.arm.runs --> runs, 29 %<!-- study.arm.share -->."
    table = "| arm | end <!-- final --> | 95 % <!-- low high --> |\n| --- | --- | --- |\n| 2 <!-- study.arm --> | .17 | [−.05, .30] |"
    assert pages.fill(right, of) == right and pages.fill(table, of) == table
    assert pages.fill("So .18<!-- study.arm.final --> now", of) == "So .17<!-- study.arm.final --> now"
    assert pages.fill("less by .05<!-- -study.arm.low -->", of) == "less by .05<!-- -study.arm.low -->"
    assert pages.fill(table.replace(".30", ".31"), of) == table
    large = "took 1,564.0<!-- study.arm.runs --> s"
    assert pages.fill(large, of) == large
    assert unnamed(f"{right}\n\n{table}") == [] and unnamed("It ended at .17.") == [".17"]
    with pytest.raises(KeyError, match="study.arm.end is not in"):
        pages.fill("1<!-- study.arm.end -->", of)
    with pytest.raises(ValueError, match="has not 2 numbers"):
        pages.fill(table.replace(", .30", ""), of)


def test_commands_in_pages_exist():
    targets = {*re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()}
    known = {*typer.main.get_command(app).commands}
    told = "\n".join(
        page.read_text(encoding="utf-8") for page in {*MARKED, *(p for p in OTHER if p.is_file())}
    )
    code = re.findall(r"^```bash\n(.*?)^```", told, re.M | re.S) + re.findall(r"`([^`\n]+)`", told)
    lines = [line.strip() for block in code for line in block.split("\n")]
    assert {line.split()[1] for line in lines if re.match(r"make [a-z]", line)} <= targets
    commands = (re.match(r"(?:\.venv/bin/)?stppo ([a-z][a-z-]*)", line) for line in lines)
    assert {found[1] for found in commands if found} <= known


def test_the_divisors_page_has_the_verdict_of_every_entry_that_was_read():
    folder = ROOT / "results/reference/divisor"
    page = (folder / "README.md").read_text(encoding="utf-8")
    said = dict(re.findall(r"<!-- divisor\.(\w+) -->.*\| ([a-z ]+) \|$", page, re.M))
    found = pd.read_csv(folder / divisor.CLAIMS).set_index("id")["verdict"]
    assert {name: said.get(values.key(name)) for name in found.index} == found.to_dict()


@pytest.mark.slow
def test_verdicts_of_the_divisors_trial_are_those_of_the_records():
    folder = ROOT / "results/reference/divisor"
    found = divisor.verdicts(load_metrics(folder / divisor.METRICS))
    kept = pd.read_csv(folder / divisor.CLAIMS)
    assert list(found["verdict"]) == list(kept["verdict"]) and list(found["id"]) == list(kept["id"])


@pytest.mark.slow
def test_verdicts_are_those_of_the_records():
    folder = ROOT / "results/reference/study"
    found = claims.table(claims.evaluate(load_metrics(folder / "metrics"))).set_index("id")["verdict"]
    assert found.equals(pd.read_csv(folder / "claims/claims.csv").set_index("id")["verdict"])
