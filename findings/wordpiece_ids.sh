#!/usr/bin/env bash
# Guessed: a tokenizer trained twice on one text is the same tokenizer, as nothing is drawn.
# So is: WordPiece, and byte pair encoding whose inner pieces have a prefix ("##"), number their pieces differently each time, within one
# process too; which pieces there are is the same. Byte pair encoding without a prefix gives the same twice. tokenizers 0.22.2.
# Why it matters: a script that trains its tokenizer anew before it loads a policy's weights feeds that policy other words, and says nothing:
# vocabulary size and texts after decoding are right. Two runs of one seed differ from the first prompt on. Keep tokenizer.json.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet tokenizers==0.22.2
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import random
import sys
from importlib.metadata import version

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

UNKNOWN, SIZE, TIMES = "[UNK]", 1000, 4
rng = random.Random(0)
words = ["".join(rng.choice("abcdefgh") for _ in range(rng.randint(2, 9))) for _ in range(3000)]
text = [" ".join(rng.choice(words) for _ in range(50)) for _ in range(200)]
common = {"vocab_size": SIZE, "special_tokens": [UNKNOWN], "show_progress": False}


def wordpiece():
    return models.WordPiece(unk_token=UNKNOWN), trainers.WordPieceTrainer(**common)


def pairs(**prefix):
    return models.BPE(unk_token=UNKNOWN, **prefix), trainers.BpeTrainer(**common, **prefix)


def trained(model, trainer):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


print("tokenizers", version("tokenizers"), f"- trained {TIMES} times on one text")
numbered = {}
for name, make in {
    "WordPiece": wordpiece,
    "byte pairs, prefix ##": lambda: pairs(continuing_subword_prefix="##"),
    "byte pairs": pairs,
}.items():
    first, *others = [trained(*make()) for _ in range(TIMES)]
    same = all(other.get_vocab().keys() == first.get_vocab().keys() for other in others)
    numbered[name] = max(sum(first.encode(w).ids != other.encode(w).ids for w in words) for other in others)
    print(f"{name}: the same pieces: {same}; words with other ids than the first time, at most: {numbered[name]} of {len(words)}")
if not numbered["WordPiece"] or not numbered["byte pairs, prefix ##"] or numbered["byte pairs"]:
    sys.exit("CHANGED: all three give the same ids each time, or none does")
PYTHON
