#!/usr/bin/env bash
# Guessed: an answer is verified by one that is written as it is, and not by another number.
# So is: what is no mathematics is parsed to nothing, and nothing verifies nothing: "Paris" is wrong for "Paris", "A" for "A". A season is a
# difference: 1899 is right for "1951-52". "50%" is verified by 50 and by 0.5, which do not verify each other. Of "5 or 7" the last number
# counts. math-verify 0.9.0.
# Why it matters: it is the usual reward where answers are numbers. On questions that a search answers, names and choices are never
# rewarded, whatever the agent learns, and a wrong year may be.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet 'math-verify[antlr4_13_2]==0.9.0'
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from math_verify import parse, verify

print("math-verify", version("math-verify"))
expected = {
    ("Paris", "Paris"): False,
    ("A", "A"): False,
    ("1951-52", "1899"): True,
    ("50%", "50"): True,
    ("50%", "0.5"): True,
    ("50", "0.5"): False,
    ("5", "5 or 7"): False,
    ("7", "5 or 7"): True,
}
found = {}
for gold, answer in expected:
    found[gold, answer] = verify(parse(gold), parse(answer))
    print(f"right: {gold!r}, said: {answer!r}: {found[gold, answer]}; read as {parse(answer)}")
if found != expected:
    sys.exit("CHANGED: answers are judged in another way")
PYTHON
