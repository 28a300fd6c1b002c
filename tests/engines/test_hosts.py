"""The pages' options make verl and TRL compute our YAML files: the lines are taken from the pages' own tables, and go through
the hosts' own configs, advantages and losses."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.hosts.batch import GROUP, compared, fixed_batch, ours
from benchmarks.hosts.cells import DEFAULTS
from benchmarks.hosts.losses import HOSTS
from benchmarks.hosts.measured import FILE, measured

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
RUN = {host: HOSTS[host][0] for host in ("verl", "trl")}
BATCH = fixed_batch()
EQUAL = 1e-6
STD_EPS = {"verl": 1e-6, "trl": 1e-4}  # what a host adds to the standard deviation of a group's rewards


@pytest.fixture(autouse=True)
def single_thread():
    torch.set_num_threads(1)


@cache
def rows(host):
    """Algorithm -> (its options, the remark beside them), from the tables of docs/howto."""
    text = (ROOT / f"docs/howto/{host}.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+)` \|(?: [^`|]+ \|)? `([^`]+)` \| ([^|]+) \|", text, re.M)
    return {name: (line, remark) for name, line, remark in found}


def test_every_algorithm_has_a_row_or_a_reason():
    """So that a table of another form is not read as an empty one."""
    shipped = {file.stem for file in (ROOT / "configs/algorithm").glob("*.yaml")}
    assert len(rows("verl")) == len(shipped) - 13 - 5, "all but what a loss cannot be and the paper's own"
    assert len(rows("trl")) == len(shipped) - 14


CASES = [pytest.param(host, name, id=f"{host}-{name}") for host in RUN for name in rows(host)]


@pytest.mark.parametrize(("host", "name"), CASES)
def test_the_pages_options_make_the_yamls_gradient(host, name):
    """Where the remark says that the credit differs, on the host's advantages."""
    line, remark = rows(host)[name]
    gradient, advantages = RUN[host](line, BATCH)
    given = {"advantages": advantages} if "its credit differs" in remark else {"eps": STD_EPS[host]}
    found = compared(gradient, ours(name, BATCH, **given))
    if "a constant factor" in remark:
        assert abs(found["cosine"] - 1) < EQUAL
        assert found["norm_ratio"] == pytest.approx((GROUP - 1) / GROUP, abs=EQUAL)
    else:
        assert found["distance"] < EQUAL
    if "its credit differs" in remark:
        assert compared(gradient, ours(name, BATCH))["distance"] > 0.01, "and it does differ"


@pytest.mark.parametrize(("host", "name"), CASES)
def test_a_cut_into_micro_batches_changes_nothing_unless_the_remark_says_so(host, name):
    line, remark = rows(host)[name]
    found = compared(RUN[host](line, BATCH, 4)[0], RUN[host](line, BATCH)[0])
    assert (found["distance"] < EQUAL) == ("micro-batch" not in remark)


# ---- the page "One name, many algorithms" -------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "name"),
    [pytest.param(host, name, id=f"{host}-{name}") for host in RUN for name in DEFAULTS[host]],
)
def test_a_recorded_cell_is_what_the_host_computes(host, name):
    """Cosine and size at the host's defaults, after a cut into micro-batches, and with the options that make it equal."""
    recorded = json.loads(FILE.read_text(encoding="utf-8"))[host]["cells"]
    assert list(recorded) == list(DEFAULTS[host])
    found = measured(host, name)
    for row, part in (
        (found, recorded[name]),
        *((found[key], recorded[name][key]) for key in ("cut", "equal")),
    ):
        for key in ("cosine", "norm_ratio", "distance"):
            assert row[key] == pytest.approx(part[key], abs=1e-5)
        assert row.get("line") == part.get("line")
