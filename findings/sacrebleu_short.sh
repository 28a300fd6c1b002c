#!/usr/bin/env bash
# Guessed: BLEU of replies that equal their references is 100, by sacrebleu's corpus_bleu as by its sentence_bleu.
# So is: 0.0 where no reply is longer than three words, for all of them together, and nothing is said. There is no run of four words to be
# found, and what is not there counts as not matched. sentence_bleu shortens the runs by itself and gives 100; corpus_bleu and the command
# line do not. One reply of four words among them makes it 100. sacrebleu 2.6.0.
# Why it matters: answers to questions are names and years. A perfect agent scores 0, and whether it does depends on whether some gold
# answer happens to be long. chrF, or exact match, has no such step.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet sacrebleu==2.6.0
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys

import sacrebleu

answers = ["Marie Curie", "1903", "the Nobel Prize"]
longer = [*answers, "the city of Paris"]
short = sacrebleu.corpus_bleu(answers, [answers])
by_sentence = [sacrebleu.sentence_bleu(answer, [answer]).score for answer in answers]
with_longer = sacrebleu.corpus_bleu(longer, [longer])
one_wrong = sacrebleu.corpus_bleu(["Albert Einstein", *longer[1:]], [longer])
print("sacrebleu", sacrebleu.__version__)
print(f"perfect answers of at most three words: corpus {short.score:.1f}, one by one {[round(score, 1) for score in by_sentence]}")
print(f"with one of four words: corpus {with_longer.score:.1f}; the first answer of these four wrong: {one_wrong.score:.1f}")
if short.score != 0 or min(by_sentence) < 99 or with_longer.score < 99:
    sys.exit("CHANGED: short perfect answers have another BLEU")
PYTHON
