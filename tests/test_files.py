"""Hashes of content and their cache; folders written whole; JSON that others wrote."""

import json
import os

import pytest

from stppo.files import content_hash, parse_json, printable, read_yaml, write_folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("STPPO_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def settled(file, text, seconds=1_000_000):
    """A file that was last changed long ago, whatever its system says of its inode."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    os.utime(file, (seconds, seconds))
    return file


def test_a_hash_is_that_of_the_bytes_wherever_they_are(tmp_path):
    one, same = settled(tmp_path / "a", "text"), settled(tmp_path / "b", "text", 5)
    assert content_hash(one) == content_hash(same) != content_hash(settled(tmp_path / "c", "test"))


def test_a_folder_counts_with_names_and_bytes_but_not_hidden_files(tmp_path):
    settled(tmp_path / "d" / "x" / "a", "1")
    before = content_hash(tmp_path / "d")
    settled(tmp_path / "d" / ".lock", "1")
    settled(tmp_path / "d" / ".git" / "a", "1")
    assert content_hash(tmp_path / "d") == before
    os.rename(tmp_path / "d" / "x" / "a", tmp_path / "d" / "x" / "b")
    assert content_hash(tmp_path / "d") != before


def test_a_large_file_is_read_once_and_again_when_it_changed(tmp_path, monkeypatch):
    file = settled(tmp_path / "a", "text")
    monkeypatch.setattr("time.time", lambda: file.stat().st_ctime + 10)
    before = content_hash(file)
    with monkeypatch.context() as patched:
        patched.setattr("hashlib.file_digest", None)
        assert content_hash(file) == before
    settled(file, "test")  # as long, and with the same time of its last change
    assert content_hash(file) != before


def test_without_a_cache_it_is_computed_each_time(tmp_path, monkeypatch):
    file = settled(tmp_path / "a", "text")
    (tmp_path / "cache").write_text("in the way")
    monkeypatch.setattr("time.time", lambda: file.stat().st_ctime + 10)
    assert content_hash(file) == content_hash(file)


def test_a_folder_appears_whole_and_the_first_stays(tmp_path):
    place = tmp_path / "a/folder"

    def writing(text):
        return lambda part: (part / "file").write_text(text)

    def broken(part):
        (part / "file").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(place, broken)
    assert list(place.parent.iterdir()) == []
    write_folder(place, writing("first"))
    write_folder(place, writing("second"))
    assert (place / "file").read_text() == "first"
    write_folder(place, writing("third"), lambda found: (found / "file").read_text() == "third")
    assert (place / "file").read_text() == "third" and list(place.parent.iterdir()) == [place]


def test_strings_are_clean_wherever_they_stand():
    assert parse_json(r'{"a\ud800": ["\uDFFF", "\ud83d\ude00", {"b": "ж"}]}') == {
        "a\ufffd": ["\ufffd", "\U0001f600", {"b": "ж"}]
    }
    assert parse_json('"a"'.encode("utf-8-sig")) == "a"


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, "", "{", "nul"])
def test_whatever_is_no_json_is_a_decode_error(text):
    with pytest.raises(json.JSONDecodeError):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x [1]\nb: *x\n", "it has aliases"),
        ("a: [1\n", "no YAML"),
        ("a: '" + "x" * (1 << 20) + "'\n", "longer than 1048576 bytes"),
        ("[" * 100 + "[1]" + "]" * 100, "nested more than 100 deep"),
        ("a: \x00", "no YAML"),
    ],
)
def test_a_config_without_end_is_refused(tmp_path, text, said):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_yaml(file)


def test_a_config_may_be_nested(tmp_path):
    (tmp_path / "config.yaml").write_text("[" * 99 + "[1]" + "]" * 99)
    found = read_yaml(tmp_path / "config.yaml")
    for _ in range(100):
        (found,) = found
    assert found == 1


def test_a_config_is_read(tmp_path):
    (tmp_path / "config.yaml").write_text("a: {b: [1, 2.5, null]}\n")
    assert read_yaml(tmp_path / "config.yaml") == {"a": {"b": [1, 2.5, None]}}


def test_what_is_printed_steers_no_terminal_and_ends():
    assert printable("a\x1b[2J\nb\u202ec\td") == "a\ufffd[2J b\ufffdc d"
    assert printable("Zürich 中") == "Zürich 中"
    assert printable("x" * 5000 + "y", 100) == f"{'x' * 50} ... {'x' * 49}y"


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(UnicodeDecodeError):
        parse_json(b'"\xed\xa0\x80"')
