#!/usr/bin/env bash
# Guessed: a regular expression that guides sampling means what it means to Python, and the same whichever library of vLLM's guides.
# So is: to xgrammar, vLLM's first choice, the dot stands for a line break too. llguidance and outlines-core, its other two, agree with Python.
# xgrammar 0.2.9, llguidance 1.9.1, outlines-core 0.2.14.
# Why it matters: <search>.*</search>, meant for a query of one line, lets a policy go on over many lines, and past the end of its search. Which
# library guides depends on the request, so the same setting gives queries of both kinds.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 xgrammar==0.2.9 llguidance==1.9.1 outlines_core==0.2.14
fi
"$FINDINGS_VENV/bin/python" -W ignore - <<'PYTHON'
import re
import sys
from importlib.metadata import version

import llguidance
import outlines_core
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

LETTERS = [bytes([code]) for code in (10, *range(32, 127))]  # each byte a token


def by_xgrammar(pattern, text):
    return _is_grammar_accept_string(xgrammar.Grammar.from_regex(pattern), text)


def by_llguidance(pattern, text):
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), llguidance.grammar_from("regex", pattern))
    read = matcher.try_consume_tokens(list(text.encode()))
    return read == len(text.encode()) and matcher.is_accepting()


def by_outlines(pattern, text):
    index = outlines_core.Index(pattern, outlines_core.Vocabulary(999, {letter: [i] for i, letter in enumerate(LETTERS)}))
    state = index.get_initial_state()
    for code in text.encode():
        state = index.get_next_state(state, LETTERS.index(bytes([code])))
        if state is None:
            return False
    return index.is_final_state(state)


print(*(f"{name} {version(name)}" for name in ("xgrammar", "llguidance", "outlines_core")), sep=", ")
found = {}
for pattern, text in [("<search>.*</search>", "<search>Emma</search>"), ("<search>.*</search>", "<search>Emma\nauthor</search>")]:
    judges = dict(python=lambda p, t: bool(re.fullmatch(p, t)), xgrammar=by_xgrammar, llguidance=by_llguidance, outlines_core=by_outlines)
    found[pattern, text] = [judge(pattern, text) for judge in judges.values()]
    print(repr(pattern), "takes", repr(text), dict(zip(judges, found[pattern, text])))
if list(found.values()) != [[True] * 4, [False, True, False, False]]:
    sys.exit("CHANGED: the three now agree on a dot, or another one differs")
PYTHON
