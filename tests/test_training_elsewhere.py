"""A run that goes on in an empty folder of another machine, from what STPPO_CHECKPOINTS holds."""

import json
import socket
from pathlib import Path

import pytest

from stppo.record.schema import CHECKPOINT_DIR
from stppo.training.checkpoint import newest
from stppo.training.elsewhere import VARIABLE
from stppo.training.failures import RunStopped
from tests.conftest import TINY, compose
from tests.training_runs import assert_same_metrics, interrupted, run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, barely_trained):
    folder = tmp_path_factory.mktemp("undisturbed")
    run(compose(list(TINY)), folder, barely_trained)
    return folder


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(VARIABLE, f"file://{tmp_path}/place")
    return tmp_path / "place"


def copies(place: Path) -> list[Path]:
    return sorted(place.glob("*/*"))


def started(folder: Path) -> str:
    return json.loads((folder / "run.json").read_text())["started"]


def goes_on(config, folder, start, cut) -> None:
    record = run(config, folder, start)
    assert record["status"] == "completed" and record["started"] == started(cut)  # else it would begin anew


def test_retry_in_an_empty_folder_goes_on_to_the_same_numbers(
    tmp_path, tiny, barely_trained, undisturbed, place
):
    interrupted(tiny(), tmp_path / "lost", barely_trained)
    assert len(copies(place)) == 1
    (tmp_path / "other").mkdir()
    goes_on(tiny(), tmp_path / "other", barely_trained, tmp_path / "lost")
    assert_same_metrics(undisturbed, tmp_path / "other")
    # A job whose results were lost after its last iteration has nothing to repeat.
    goes_on(tiny(), tmp_path / "third", barely_trained, tmp_path / "lost")
    assert_same_metrics(undisturbed, tmp_path / "third")
    assert len(copies(place)) == 2


@pytest.mark.parametrize("harm", ["cut", "missing"])
def test_copy_that_was_written_by_halves_is_never_taken(
    harm, tmp_path, tiny, barely_trained, undisturbed, place
):
    interrupted(tiny(), tmp_path / "lost", barely_trained, after=4)
    assert len(copies(place)) == 2
    file = copies(place)[-1] / "policy.safetensors"
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        file.unlink()
    goes_on(tiny(), tmp_path / "other", barely_trained, tmp_path / "lost")
    assert_same_metrics(undisturbed, tmp_path / "other")


def test_what_a_folder_holds_without_a_checkpoint_is_moved_aside(tmp_path, tiny, barely_trained, place):
    interrupted(tiny(), tmp_path / "lost", barely_trained)
    interrupted(tiny("seed=1"), tmp_path / "other", barely_trained)
    (folder := newest(tmp_path / "other" / CHECKPOINT_DIR)).rename(tmp_path / folder.name)
    theirs = (tmp_path / "other" / "run.json").read_bytes()
    goes_on(tiny(), tmp_path / "other", barely_trained, tmp_path / "lost")
    assert (tmp_path / "other" / "earlier-1" / "run.json").read_bytes() == theirs


@pytest.mark.parametrize("url", ["nonsense://a/b", "file:///proc/no/such", "http://127.0.0.1:9/c"])
def test_place_that_cannot_be_used_is_one_line_before_training(
    url, tmp_path, tiny, barely_trained, monkeypatch
):
    monkeypatch.setenv(VARIABLE, url)
    with pytest.raises(
        RunStopped, match=f"{VARIABLE}={url} cannot be used .*nothing is lost.*leave"
    ) as caught:
        run(tiny(), tmp_path / "run", barely_trained)
    assert "\n" not in str(caught.value)


def test_place_that_goes_away_costs_nothing_and_is_said_once(
    tmp_path, tiny, barely_trained, undisturbed, place, caplog
):
    interrupted(tiny(), tmp_path / "run", barely_trained)
    place.rename(tmp_path / "gone")
    place.write_text("in the way")
    run(tiny(), tmp_path / "run", barely_trained)
    assert_same_metrics(undisturbed, tmp_path / "run")
    said = [record.getMessage() for record in caplog.records if "is not copied to" in record.getMessage()]
    assert len(said) == 1 and "training goes on" in said[0] and "\n" not in said[0]


def test_s3_on_loopback(tmp_path, tiny, barely_trained, undisturbed, monkeypatch):
    pytest.importorskip("s3fs", reason="needs s3fs and moto: pip install s3fs 'moto[server]'")
    server = pytest.importorskip("moto.server", reason="needs moto: pip install 'moto[server]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    s3 = server.ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
    s3.start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1",
        VARIABLE: "s3://bucket/checkpoints",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        interrupted(tiny(), tmp_path / "lost", barely_trained, after=4)
        goes_on(tiny(), tmp_path / "other", barely_trained, tmp_path / "lost")
    finally:
        s3.stop()
    assert_same_metrics(undisturbed, tmp_path / "other")
