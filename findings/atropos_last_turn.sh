#!/usr/bin/env bash
# Guessed: `tokenize_for_trainer` leaves unmasked what the agent wrote, in every turn.
# So is: the last message alone, unless `train_on_all_assistant_turns` is said. Of an agent that searches twice and answers, neither search is trained.
# Its last message may even be a tool's: then the passages are trained. atroposlib 0.4.0.
# Why it matters: the turns that decide what is found get no gradient, and nothing fails.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet numpy transformers==4.57.3 jinja2 openai
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps atroposlib==0.4.0 # of its requirements this part needs the ones above
fi
"$FINDINGS_VENV/bin/python" - <<'PYTHON' 2>/dev/null
import sys
from importlib.metadata import version

from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT = [
    {"role": "user", "content": "who wrote the odyssey"},
    {"role": "assistant", "content": "search odyssey author"},
    {"role": "tool", "content": "an epic poem of ancient greece"},
    {"role": "assistant", "content": "search epic poem poet"},
    {"role": "tool", "content": "homer is its poet"},
    {"role": "assistant", "content": "answer homer"},
]
MARKS = ["<user>", "<assistant>", "<tool>", "<end>"]
words = sorted({word for message in CHAT for word in message["content"].split()})
made = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*MARKS, *words])}))
made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", additional_special_tokens=MARKS[:3])
tokenizer.chat_template = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def trained(chat, **options):
    """The words that are not masked."""
    found = tokenize_for_trainer(tokenizer, chat, **options)
    return " ".join(tokenizer.convert_ids_to_tokens([i for i in found["masks"] if i != -100]))


print("atroposlib", version("atroposlib"), "- what is trained of two searches and an answer")
found = {
    "by default": trained(CHAT),
    "train_on_all_assistant_turns": trained(CHAT, train_on_all_assistant_turns=True),
    "by default, after the second passage": trained(CHAT[:-1]),
}
for name, of in found.items():
    print(f"{name:37}", of)
default, every, cut = found.values()
if "search" in default or every.count("search") != 2 or "homer is its poet" not in cut:
    sys.exit("CHANGED: which turns are trained")
PYTHON
