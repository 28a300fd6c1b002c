#!/usr/bin/env bash
# Guessed: DAPO's overlong_buffer in Tunix counts tokens, as max_response_length does wherever else it stands.
# So is: the length of a completion is that of its text, in letters. By default the penalty begins at 16,384 letters, some 4,000 tokens of English, and is
# whole at 20,480. google-tunix 0.1.7.
# Why it matters: with limits set in tokens, answers of a quarter of the intended length are punished. Advantages then reward being short.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet google-tunix==0.1.7 jax==0.10.2 flax==0.12.8
fi
JAX_PLATFORMS=cpu "$FINDINGS_VENV/bin/python" -W ignore - <<'PYTHON'
import sys
from importlib.metadata import version

from tunix.rl.grpo.dapo_learner import DAPOConfig, reward_shaping

buffer = DAPOConfig(num_generations=2).overlong_buffer
print("google-tunix", version("google-tunix"), buffer)
word = "passage "  # a token of most tokenizers
found = {words: reward_shaping(prompts=[""], completions=[word * words], mode=None, overlong_buffer=buffer)[0] for words in (2000, 2304, 2560)}
print("penalty by the number of words, one token each:", found)
if found != {2000: 0, 2304: -0.5, 2560: -1.0}:
    sys.exit("CHANGED: the penalty no longer counts letters")
PYTHON
