#!/usr/bin/env bash
# Guessed: with mask_truncated_completions=True, a trajectory that the token budget cuts off in the middle of its tool calls is left out of the
# loss by TRL's GRPOTrainer, and counted in completions/clipped_ratio.
# So is: a tool's result that would pass the budget is dropped, and the trajectory ends with the call. That ends with the end-of-turn token,
# so it counts as finished: clipped_ratio is 0, and its tokens are trained on. Only text that breaks off is cut off. It is the
# same where max_tool_calling_iterations ends it. trl 1.16.0, transformers 5.10.4.
# Why it matters: in a search agent it is the long trajectories that end so, before any answer. They are failures of the budget and
# are punished for their last search, which is what the option was to prevent; the log says that nothing was cut.
set -euo pipefail
if [ -z "${FINDINGS_VENV:-}" ]; then
  FINDINGS_VENV=$(mktemp -d)
  trap 'rm -rf "$FINDINGS_VENV"' EXIT
  python3 -m venv "$FINDINGS_VENV"
  "$FINDINGS_VENV/bin/pip" install --quiet trl==1.16.0 transformers==5.10.4 torch==2.13.0 jmespath
fi
cd "$(mktemp -d)"
HF_HUB_OFFLINE=1 "$FINDINGS_VENV/bin/python" - <<'PYTHON'
import sys
from importlib.metadata import version

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

letters = Tokenizer(models.BPE({letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=letters, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"],
    chat_template=qwen3_chat_template,
)  # fmt: skip
SIZES = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=len(tokenizer))
BUDGET = 200
CALLS = [
    f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{name}"}}}}\n</tool_call><|im_end|>' for name in ("Curie", "Bohr")
]
BROKEN_OFF = [f"{word} it may have been" + " or" * 59 for word in ("Perhaps", "I think")]


def search(query: str) -> str:
    """Search.

    Args:
        query: what to look for.
    """
    return "A passage that is longer than what is left of the budget. " * 5


class Scripted(GRPOTrainer):
    """The two answers of a group are written beforehand; all else is TRL's."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return [tokenizer(text, add_special_tokens=False).input_ids[:BUDGET] for text in self.texts], None


def first_update(texts, budget=BUDGET, **options):
    """What TRL logs of it."""
    torch.manual_seed(0)
    args = GRPOConfig(
        "out", per_device_train_batch_size=2, num_generations=2, max_completion_length=budget, mask_truncated_completions=True,
        max_steps=1, **options, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False, disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "When?"}]}])
    trainer = Scripted(
        LlamaForCausalLM(LlamaConfig(**SIZES)), lambda completions, **_: [0.0, 1.0], args=args, train_dataset=data,
        processing_class=tokenizer, tools=[search],
    )  # fmt: skip
    trainer.texts = texts
    trainer.train()
    return trainer.state.log_history[0]


print("trl", version("trl"), "transformers", version("transformers"))
found = {
    "the budget ends it at a search": first_update(CALLS),
    "the limit of calls ends it": first_update(CALLS, 1000, max_tool_calling_iterations=1),
    "its text breaks off": first_update(BROKEN_OFF),
}
for name, log in found.items():
    print(
        f"{name:30} tools called {log['tools/call_frequency']:.0f}, length {log['completions/mean_length']:.0f}, "
        f"clipped_ratio {log['completions/clipped_ratio']:.0f}, gradient norm {log['grad_norm']:.3f}"
    )
*cut, broken = found.values()
if any(log["completions/clipped_ratio"] != 0 or log["grad_norm"] < 1e-4 for log in cut):
    sys.exit("CHANGED: TRL counts what the budget or the limit of calls ends as cut off")
if broken["completions/clipped_ratio"] != 1 or broken["grad_norm"] > 0:
    sys.exit("CHANGED: TRL trains on text that breaks off")
PYTHON
