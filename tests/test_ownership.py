"""Locks of folders: one owner at a time, a dead one's lock is taken over; runs whose pipeline is gone."""

import os
import signal
import subprocess
import sys
import time

import pytest

from stppo.record.ownership import LOCK_FILE, FolderInUse, FolderLock

HOLD = """
import sys, time
from stppo.record.ownership import FolderLock
with FolderLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder `run`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def foreign(folder, patience=90.0):
    """What an owner on another machine leaves in a folder."""
    folder.mkdir(exist_ok=True)
    lines = ["filelock/2", "pid=1", "host=node7", "mode=lease", "token=x", f"duration={patience}", "start=1"]
    (folder / LOCK_FILE).write_text("\n".join(lines) + "\n")


def test_a_second_process_is_refused_and_told_who_the_first_is(tmp_path, holder):
    with pytest.raises(FolderInUse, match=rf"is in use by process {holder.pid} on \S+: .*another folder"):
        FolderLock(tmp_path / "run").__enter__()


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, holder, caplog):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with FolderLock(tmp_path / "run"):
        assert f"process {holder.pid}" in caplog.text and "taken over" in caplog.text
        assert f"pid={os.getpid()}" in (tmp_path / "run" / LOCK_FILE).read_text()
    assert not (tmp_path / "run" / LOCK_FILE).exists()


def test_who_waits_gets_it_when_the_owner_ends(tmp_path, holder):
    waiter = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HOLD.replace("(sys.argv[1])", "(sys.argv[1], wait=True)"),
            str(tmp_path / "run"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert "waiting for it" in waiter.stderr.readline()
        holder.kill()
        holder.wait()
        assert waiter.stdout.readline() == "held\n"
    finally:
        waiter.kill()
        waiter.wait()


def test_the_same_process_cannot_have_it_twice(tmp_path):
    with FolderLock(tmp_path), pytest.raises(FolderInUse):
        FolderLock(tmp_path).__enter__()
    with FolderLock(tmp_path):
        pass


def test_an_owner_on_another_machine_is_dead_when_its_heartbeat_stops(tmp_path):
    foreign(tmp_path, patience=0.5)
    with FolderLock(tmp_path, beat=0.1, patience=0.5) as lock:
        lock.check()


def test_an_owner_on_another_machine_lives_while_its_heart_beats(tmp_path):
    foreign(tmp_path)
    beat = "import os, sys, time\nwhile True:\n os.utime(sys.argv[1])\n time.sleep(0.05)"
    process = subprocess.Popen([sys.executable, "-c", beat, str(tmp_path / LOCK_FILE)])
    try:
        with pytest.raises(FolderInUse, match="process 1 on node7"):
            FolderLock(tmp_path).__enter__()
    finally:
        process.kill()
        process.wait()


def test_the_heart_beats(tmp_path):
    with FolderLock(tmp_path, beat=0.02):
        os.utime(tmp_path / LOCK_FILE, (0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / LOCK_FILE).stat().st_mtime == 0:
            assert time.monotonic() < deadline


def test_an_owner_that_slept_while_another_took_over_is_told(tmp_path):
    with FolderLock(tmp_path) as lock:
        (tmp_path / LOCK_FILE).unlink()
        foreign(tmp_path)
        with pytest.raises(FolderInUse, match="taken over by process 1 on node7"):
            lock.check()
    assert (tmp_path / LOCK_FILE).exists(), "the other's lock stays"


def test_a_lock_file_that_a_kill_cut_off_names_nobody(tmp_path):
    (tmp_path / LOCK_FILE).write_text('{"pid": ')
    with FolderLock(tmp_path):
        pass


def test_a_forked_child_does_not_keep_the_lock(tmp_path):
    program = (
        "import os, sys, time\nfrom stppo.record.ownership import FolderLock\n"
        "with FolderLock(sys.argv[1]):\n"
        " child = os.fork()\n"
        " if child == 0: print(os.getpid(), flush=True); time.sleep(60); os._exit(0)\n"
        " time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        with FolderLock(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
