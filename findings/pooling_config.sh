#!/usr/bin/env bash
# Guessed: the pooling file of a sentence-transformers folder says how it pools by switches, one of them true
# (pooling_mode_cls_token, pooling_mode_mean_tokens, ...), as it did up to 5.3.
# So is: since 5.4 it writes one text, "pooling_mode": "cls", and none of the switches.
# sentence-transformers 6.2.0, transformers 5.24.0.
# Why it matters: a reader of the folder that looks for the switches finds none and falls back to the mean. The vectors
# are then others, and nothing says so.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet sentence-transformers==6.2.0 transformers==5.24.0 torch==2.13.0
fi
cd "$(mktemp -d)"
"$FINDINGS_VENV/bin/python" - <<'PYTHON'
import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from transformers import BertConfig, BertModel, BertTokenizerFast

try:
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
except ImportError:  # where they were up to 5.3
    from sentence_transformers.models import Pooling, Transformer

words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "oslo", "is", "a", "city"]
Path("bert").mkdir()
Path("bert/vocab.txt").write_text("\n".join(words))
BertTokenizerFast(vocab="bert/vocab.txt").save_pretrained("bert")
torch.manual_seed(0)
sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
BertModel(BertConfig(vocab_size=len(words), **sizes, initializer_range=0.5)).save_pretrained("bert")
layers = [Transformer("bert"), Pooling(16, pooling_mode="cls")]
model = SentenceTransformer(modules=layers, device="cpu")
model.save("own")

said = json.loads(Path("own/1_Pooling/config.json").read_text())
states = BertModel.from_pretrained("own")(**BertTokenizerFast.from_pretrained("own")("oslo is a city", return_tensors="pt"))
first, mean = states.last_hidden_state[0, 0], states.last_hidden_state[0].mean(0)
vector = torch.as_tensor(model.encode("oslo is a city"))
to_first, to_mean = (float(torch.cosine_similarity(vector, other, dim=0)) for other in (first, mean))
print("sentence-transformers", version("sentence-transformers"), "transformers", version("transformers"))
print("its pooling file:", said)
print(f"cosine of its vector to the first token's state: {to_first:.3f}, to the mean of the states: {to_mean:.3f}")
switches = [name for name in said if name.startswith("pooling_mode_")]
if said.get("pooling_mode") != "cls" or switches or to_first < 0.999 or to_mean > 0.99:
    sys.exit("CHANGED: the pooling file has switches again, or another text")
PYTHON
