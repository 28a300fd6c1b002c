"""Random Llamas, Qwen2s and GPT-2s as GGUF files of a few kilobytes, with a byte-level tokenizer and a chat template."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
RARE, MARK = (
    "</s>",
    "<tool_call>",
)  # a control token that no conversion knows by name, and one that is no control token
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, POSITIONS = 32, 3, 4, 2, 48, 512


def write_gguf(
    file: Path,
    architecture: str = "llama",
    template: str | None = TEMPLATE,
    tied: bool = True,
    seed: int = 0,
    without: str | None = None,
    scaling: str = "none",
    frequency_factor: float = 1.0,
    pre: str | None = None,
) -> dict[str, np.ndarray]:
    """Write the model; returns its weights by the names that GGUF has for them. In it <|im_end|> is the end token.

    without: name of a tensor that is left out. pre: how text is split (default: the architecture's own). scaling, frequency_factor: how rotary positions are scaled, by a named method or
    by a tensor."""
    rng = np.random.default_rng(seed)
    kinds = dict.fromkeys((PAD, START, END), gguf.TokenType.CONTROL)
    kinds |= dict.fromkeys([*sorted(ByteLevel.alphabet()), "Ġt", "he"], gguf.TokenType.NORMAL)
    kinds |= {RARE: gguf.TokenType.CONTROL, MARK: gguf.TokenType.USER_DEFINED}
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    if architecture == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_head_count_kv(KV_HEADS)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or {"qwen2": "qwen2", "gpt2": "gpt-2"}.get(architecture, "smollm"))
    writer.add_token_list(list(kinds))
    writer.add_token_types(list(kinds.values()))
    # Two at least: transformers takes a list of one for its member.
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    weights = {}
    for name, shape in _shapes(architecture, len(kinds), tied).items():
        scale = 0.2 * rng.standard_normal(shape)
        weights[name] = (1 + scale if len(shape) == 1 else scale).astype(np.float32)
        if name != without:
            writer.add_tensor(name, weights[name])
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    writer.add_tensor("rope_freqs.weight", np.full(HIDDEN // HEADS // 2, frequency_factor, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _shapes(architecture: str, vocabulary: int, tied: bool) -> dict[str, tuple[int, ...]]:
    """Of each tensor, (out, in) where it is a matrix."""
    width = HIDDEN // HEADS * KV_HEADS
    outside = {"token_embd": (vocabulary, HIDDEN), "output_norm": (HIDDEN,)}
    outside |= {} if tied else {"output": (vocabulary, HIDDEN)}
    layer = {"attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_output": (HIDDEN, HIDDEN)}
    layer |= {"ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
    if architecture == "gpt2":
        outside |= {"position_embd": (POSITIONS, HIDDEN)}
        layer |= {"attn_qkv": (3 * HIDDEN, HIDDEN)}
        biased = {"output_norm", *layer}
    else:
        layer |= {"attn_q": (HIDDEN, HIDDEN), "attn_k": (width, HIDDEN), "attn_v": (width, HIDDEN)}
        layer |= {"ffn_gate": (INNER, HIDDEN)}
        biased = {"attn_q", "attn_k", "attn_v"} if architecture == "qwen2" else set()
    shapes = {}
    for place, tensors in (("", outside), *((f"blk.{i}.", layer) for i in range(LAYERS))):
        for name, shape in tensors.items():
            shapes[f"{place}{name}.weight"] = shape
            if name in biased:
                shapes[f"{place}{name}.bias"] = shape[:1]
    return shapes
