"""Text that others wrote (corpora, records, replies of servers, run folders), made safe before anything else sees it."""

import json
import re
from typing import Any

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """The text with lone surrogates, which no encoding, tokenizer or file can hold, as U+FFFD."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def parse_json(text: str | bytes) -> Any:
    """What a JSON text holds, its strings clean.

    json.JSONDecodeError for whatever is no JSON, too deep or a number too long; UnicodeDecodeError for bytes that are not
    UTF-8.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        value = json.loads(text)
        escaped = "\\ud" in text or "\\uD" in text or _LONE_SURROGATE.search(text)
        return _clean(value) if escaped else value
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None
    except ValueError as error:  # Python reads no more than some thousand digits
        raise json.JSONDecodeError(str(error), "", 0) from None


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {clean(name): _clean(item) for name, item in value.items()}
    return value
