"""Checkpoints as folders: what goes in comes out, one is kept, and nothing that goes wrong harms it."""

import json
import math
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stppo.training.checkpoint import (
    load_checkpoint,
    newest,
    restore,
    restore_optimizer,
    save_checkpoint,
    trained,
)
from tests.conftest import edit
from tests.training_runs import assert_same_metrics, interrupted, run


def state_of(value):
    shared = torch.arange(12.0).view(3, 4)
    return {
        "iteration": value,
        "policy": {"a": torch.full((3,), float(value)), "b": shared[:, :2], "c": shared[:, 1:]},
        "optimizer": {"state": {0: {"step": torch.tensor(2.0), "none": None}, 7: {}}, "betas": (0.9, 0.999)},
        "critic": None,
        "generator": torch.Generator().manual_seed(value).get_state(),
        "order": torch.empty(0, dtype=torch.long),
        "queue": [({"mask": torch.tensor([True, False])}, {"x": 0.1 + 0.2}, None)],
        "rows": [{"loss": math.nan, "big": math.inf, "n": 3}],
    }


def assert_equal(a, b):
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b or (a != a and b != b)


def test_what_goes_in_comes_out(tmp_path):
    save_checkpoint(tmp_path / "c", "f", state_of(5))
    assert_equal(state_of(5), load_checkpoint(tmp_path / "c", "f"))
    names = {path.name for path in newest(tmp_path / "c").iterdir()}
    assert {"state.json", "policy.safetensors", "optimizer.safetensors"} <= names
    assert "critic.safetensors" not in names


def test_only_the_newest_is_kept(tmp_path):
    assert load_checkpoint(tmp_path / "c", "f") is None
    for i in range(11):
        save_checkpoint(tmp_path / "c", "f", state_of(i))
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["11"]
    assert load_checkpoint(tmp_path / "c", "f")["iteration"] == 10


def test_what_a_kill_leaves_behind_is_ignored_and_goes(tmp_path):
    """Half a checkpoint, and older ones that are half removed."""
    for number in (1, 2, 3):
        save_checkpoint(tmp_path / "c", "f", state_of(number))
    shutil.copytree(newest(tmp_path / "c"), tmp_path / "c" / ".4.part")
    for left in ("1", "2", ".4.part"):
        (tmp_path / "c" / left).mkdir(exist_ok=True)
        (tmp_path / "c" / left / "policy.safetensors").write_bytes(b"half")
    assert load_checkpoint(tmp_path / "c", "f")["iteration"] == 3
    save_checkpoint(tmp_path / "c", "f", state_of(4))
    assert load_checkpoint(tmp_path / "c", "f")["iteration"] == 4
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["4"]


def test_all_of_it_is_on_the_disk_before_it_gets_its_name_and_that_before_the_older_goes(
    tmp_path, monkeypatch
):
    done = []

    def noted(name, says):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, **k: (done.append((name, says(*a))), original(*a, **k))[1])

    save_checkpoint(tmp_path / "c", "f", state_of(1))
    noted("fsync", lambda handle: Path(os.readlink(f"/proc/self/fd/{handle}")).name)
    noted("rename", lambda old, new: new.rpartition("/")[2] if isinstance(new, str) else new.name)
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **_: done.append(("remove", path.name)) if path.exists() else None
    )
    save_checkpoint(tmp_path / "c", "f", state_of(2))
    place = done.index(("rename", "2"))
    before, after = done[:place], done[place + 1 :]
    files = {path.name for path in (tmp_path / "c" / "2").iterdir()}
    assert {name for _, name in before} == files | {".2.part"} and before[-1] == ("fsync", ".2.part")
    assert after == [("fsync", "c"), ("remove", "1")]


@pytest.mark.parametrize("room", [100, 6_000])
def test_a_full_disk_leaves_the_older_checkpoint_whole(room, tmp_path):
    """The system refuses to write beyond `room` bytes, as a full disk would."""
    save_checkpoint(tmp_path / "c", "f", state_of(1))
    large = state_of(2) | {"policy": {"a": torch.zeros(100_000)}}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(OSError, match="cannot be written .*the checkpoint before it is whole.*make room"):
            save_checkpoint(tmp_path / "c", "f", large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_equal(state_of(1), load_checkpoint(tmp_path / "c", "f"))
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["1"]


def of_format(number):
    return lambda folder: edit(folder / "state.json", '"format": 3', f'"format": {number}')


def with_surplus_tensor(folder):
    file = folder / "policy.safetensors"
    save_file(load_file(file) | {"/other": torch.zeros(1)}, file)


def holding(content):
    return lambda folder: (folder / "state.json").write_text(content)


@pytest.mark.parametrize(
    ("change", "fingerprint", "said"),
    [
        (lambda folder: None, "yours", r"another run \(its seed\)"),
        (of_format(1), "mine", "format"),
        (
            lambda folder: (folder / "policy.safetensors").unlink(),
            "mine",
            "policy.safetensors cannot be read",
        ),
        (with_surplus_tensor, "mine", "policy.safetensors cannot be read"),
        (holding("[" * 100_000), "mine", "cannot be read .*set_aside"),
        (holding("null"), "mine", "cannot be read .*set_aside"),
        (holding('{"fingerprint": "mine", "format": 3, "state": 5}'), "mine", "cannot be read .*set_aside"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, change, fingerprint, said):
    save_checkpoint(tmp_path / "c", "mine", state_of(1))
    change(newest(tmp_path / "c"))
    with pytest.raises(ValueError, match=said):
        load_checkpoint(tmp_path / "c", fingerprint, difference=lambda: "its seed")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda saved: {k: v for k, v in saved.items() if k != "bias"}, "bias is missing or surplus"),
        (lambda saved: saved | {"other": torch.zeros(2)}, "other is missing or surplus"),
        (lambda saved: saved | {"weight": torch.zeros(1, 2)}, r"weight has the shape \(1, 2\), not \(3, 2\)"),
    ],
)
def test_parameters_that_are_not_exactly_the_models_are_refused(change, said):
    model = torch.nn.Linear(2, 3)
    saved = {name: weight.detach().clone() for name, weight in trained(model).items()}
    with pytest.raises(ValueError, match=said):
        restore(model, change(saved))


def test_an_optimizer_state_that_does_not_fit_is_refused():
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = torch.optim.Adam([weight])
    weight.sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    restore_optimizer(optimizer, saved)
    saved["state"][0]["exp_avg"] = torch.zeros(1, 2)
    for wrong in (saved, {}, None):
        with pytest.raises(ValueError, match="optimizer.*set_aside"):
            restore_optimizer(optimizer, wrong)


def test_a_checkpoint_without_a_part_that_the_run_needs_is_refused(tmp_path, tiny, barely_trained):
    interrupted(tiny(), tmp_path, barely_trained)
    file = newest(tmp_path / "checkpoint") / "state.json"
    content = json.loads(file.read_text())
    del content["state"]["optimizer"]
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="lacks optimizer; .*set_aside"):
        run(tiny(), tmp_path, barely_trained)


def test_only_what_is_trained_is_saved_and_put_back():
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    for each in (model, other):
        each.bias.requires_grad_(False)
    saved = {name: weight.detach().clone() for name, weight in trained(model).items()}
    assert list(saved) == ["weight"]
    bias = other.bias.clone()
    restore(other, saved)
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, bias)


def test_a_run_goes_on_under_other_memory_settings(tmp_path, tiny, barely_trained):
    """Cut into micro-batches or not: after running out of memory a run goes on from its checkpoint."""
    run(tiny(), tmp_path / "whole", barely_trained)
    interrupted(tiny(), tmp_path / "cut", barely_trained)
    smaller = tiny("training.micro_batch_tokens=300", "training.gradient_checkpointing=true")
    assert run(smaller, tmp_path / "cut", barely_trained)["iterations"] == 5
    with pytest.raises(AssertionError):  # rounding: so it did go on, and under the other settings
        assert_same_metrics(tmp_path / "whole", tmp_path / "cut")
