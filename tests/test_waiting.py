"""What takes long is said, what does not is not."""

import logging
import time

import pytest

from stppo import waiting


def test_only_what_takes_long_is_said(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "SECONDS", 0.05)
    caplog.set_level(logging.INFO)
    with waiting.saying("reading the questions"):
        time.sleep(0.3)
    with waiting.saying("a moment"):
        pass
    with pytest.raises(KeyError), waiting.saying("what fails at once"):
        raise KeyError
    time.sleep(0.2)
    assert [record.message for record in caplog.records] == ["reading the questions ..."]
