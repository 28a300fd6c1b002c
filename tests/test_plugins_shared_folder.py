"""A folder named by its content: one for all processes, kept while any of them uses it."""

import subprocess
import sys

import pytest

from stppo.plugins.shared_folder import SharedFolder


def writing(text):
    return lambda folder: (folder / "config.json").write_text(text)


def test_same_content_has_the_same_path_at_any_time(tmp_path):
    first = SharedFolder(tmp_path / "root", writing("a"))
    path = first.path
    assert (path / "config.json").read_text() == "a"
    first.close()
    first.close()
    assert not path.exists()
    again, other = (
        SharedFolder(tmp_path / "root", writing("a")),
        SharedFolder(tmp_path / "root", writing("b")),
    )
    assert again.path == path != other.path
    assert [p for p in (tmp_path / "root").iterdir() if p.name.startswith(".part")] == []


def test_it_stays_while_another_process_uses_it(tmp_path):
    code = (
        "import sys; from pathlib import Path; from stppo.plugins.shared_folder import SharedFolder\n"
        "folder = SharedFolder(Path(sys.argv[1]), lambda f: (f / 'config.json').write_text('a'))\n"
        "print(folder.path, flush=True); input(); folder.close()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    theirs = child.stdout.readline().strip()
    ours = SharedFolder(tmp_path, writing("a"))
    assert str(ours.path) == theirs
    ours.close()
    assert ours.path.exists()
    child.communicate("\n")
    assert child.returncode == 0 and not ours.path.exists()


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    def broken(folder):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        SharedFolder(tmp_path, broken)
    assert list(tmp_path.iterdir()) == []
