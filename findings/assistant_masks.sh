#!/usr/bin/env bash
# Guessed: return_assistant_tokens_mask=True marks what stands between {% generation %} and {% endgeneration %}, turn by turn.
# So is: the ends of a turn are looked up by their characters, and a tokenizer that trims offsets, as processors.ByteLevel() does unless
# told otherwise, has no token at a space. Where a turn begins with one, it and all turns after it are left out. Where one ends with
# one, everything behind it is marked: tool results, the user, other turns.
# transformers 5.10.4.
# Why it matters: supervised warm starts (TRL's assistant_only_loss) take this mask. One stray space in an answer, and a model learns to
# write its own search results, or a conversation counts for nothing; no error, no warning.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet transformers==5.10.4 jinja2
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}"
)


def tokenizer(trim):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.ByteLevel(trim_offsets=trim)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    training = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|start|>", "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(["the capital is Paris search France user assistant tool"] * 10, training)
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=TEMPLATE)


def marked(trim, search):
    """The text of the tokens that the mask marks in a conversation whose first turn is this search."""
    roles = [("user", "the capital"), ("assistant", search), ("tool", "the capital is Paris"), ("assistant", "Paris")]
    messages = [{"role": role, "content": content} for role, content in roles]
    of = tokenizer(trim)
    found = of.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return of.decode([token for token, kept in zip(found["input_ids"], found["assistant_masks"]) if kept])


print("transformers", version("transformers"), "tokenizers", version("tokenizers"))
for trim in (False, True):
    for search in ("search France", " search France", "search France "):
        print(f"trim_offsets={trim!s:5} search {search!r:16} marked: {marked(trim, search)!r}")
right = all(marked(False, search) == search + "Paris" for search in ("search France", " search France", "search France "))
if not right or marked(True, " search France") != "" or "the capital is Paris" not in marked(True, "search France "):
    sys.exit("CHANGED: spaces at the ends of a turn do no harm")
PYTHON
