"""JSON that others wrote."""

import json

import pytest

from stppo.files import parse_json


def test_strings_are_clean_wherever_they_stand():
    assert parse_json(r'{"a\ud800": ["\uDFFF", "\ud83d\ude00", {"b": "ж"}]}') == {
        "a\ufffd": ["\ufffd", "\U0001f600", {"b": "ж"}]
    }
    assert parse_json('"a"'.encode("utf-8-sig")) == "a"


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, "", "{", "nul"])
def test_whatever_is_no_json_is_a_decode_error(text):
    with pytest.raises(json.JSONDecodeError):
        parse_json(text)


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(UnicodeDecodeError):
        parse_json(b'"\xed\xa0\x80"')
