#!/usr/bin/env bash
# Guessed: in supervised training a trajectory that is longer than cutoff_len loses its end.
# So is: later turns are lost, but the one at the limit keeps its reply where that is shorter than half of the room left. The passage before it is cut
# instead, with the end of that message and the assistant's head; the reply follows the half passage without a break and is trained.
# llamafactory 0.9.3. Seen with 0.9.5 too, which wants a torch for CUDA.
# Why it matters: a search agent is taught answers whose passage it does not see, and to go on writing in the midst of what a tool returned.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet torch==2.13.0 transformers==4.52.4 datasets==3.6.0 peft==0.15.2 accelerate==1.7.0 trl==0.9.6 omegaconf==2.3.0 pyarrow==19.0.1 pandas==2.3.3
  "$FINDINGS_VENV/bin/pip" install --quiet --no-deps llamafactory==0.9.3 # of its requirements this part needs the ones above
fi
"$FINDINGS_VENV/bin/python" -W ignore - <<'PYTHON'
import sys
from importlib.metadata import version

from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
from llamafactory.data.template import get_template_and_fix_tokenizer
from llamafactory.hparams import DataArguments
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=["<|im_start|>"])
question, search, answer = "Who wrote Emma?", "<search>Emma</search>", "<answer>Jane Austen</answer>"
passage = "Emma is a novel of 1815. It was written by Jane Austen."
turns = [("user", question), ("assistant", search), ("user", passage)]
record = dict(_prompt=[[dict(role=role, content=text) for role, text in turns]], _response=[[dict(role="assistant", content=answer)]])
record |= dict(_system=[""], _tools=[""], _images=[None], _videos=[None], _audios=[None])


def prepared(limit):
    """The text that is read and the text that is trained."""
    settings = DataArguments(template="qwen", cutoff_len=limit)
    template = get_template_and_fix_tokenizer(tokenizer, settings)
    made = SupervisedDatasetProcessor(template=template, tokenizer=tokenizer, processor=None, data_args=settings).preprocess_dataset(record)
    (ids,), (labels,) = made["input_ids"], made["labels"]
    return len(ids), tokenizer.decode(ids), tokenizer.decode([label for label in labels if label >= 0])


print("llamafactory", version("llamafactory"))
length, whole, trained = prepared(4096)
_, cut, trained_when_cut = prepared(length - 40)
print("with room for all, from the passage on:", repr(whole[whole.index("Emma is") :]))
print("with 40 tokens less:                   ", repr(cut[cut.index("Emma is") :]))
print("trained in both:", repr(trained_when_cut))
if trained_when_cut != trained or not cut.endswith(f"1815. It {answer}<|im_end|>\n"):
    sys.exit("CHANGED: a passage is no longer cut before a reply that is trained")
PYTHON
