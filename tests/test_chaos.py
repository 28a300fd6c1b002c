"""The short form of `make chaos`: a few attacks of each kind."""

import random

import pytest

pytest.importorskip("fastapi", reason="the extra `retrieval` is not installed")
from tests.chaos.attacks import ATTACKS, Stage

FEW = {name: 1 for name in ATTACKS} | {
    "damaged and forged files": 25,
    "bad commands": 25,
    "hostile retrieval server": 5,
}


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    return Stage(tmp_path_factory.mktemp("chaos"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_are_survived(stage, name):
    for n in range(FEW[name]):
        ATTACKS[name](stage, random.Random(f"{name} short {n}"))
