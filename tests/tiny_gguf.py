"""Random Llamas as GGUF files of a few kilobytes, with a byte-level tokenizer and a chat template."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HIDDEN, LAYERS, HEADS, KV_HEADS, INNER = 32, 3, 4, 2, 48


def write_gguf(
    file: Path, architecture: str = "llama", template: str | None = TEMPLATE, tied: bool = True, seed: int = 0
) -> dict[str, np.ndarray]:
    """Write the model; returns its weights by the names that GGUF has for them. In it <|im_end|> is the end token."""
    rng = np.random.default_rng(seed)
    tokens = [PAD, START, END, *sorted(ByteLevel.alphabet()), "Ġt", "he"]
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    # Two at least: transformers takes a list of one for its member.
    writer.add_token_merges(["Ġ t", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    width = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {} if tied else {"output": (len(tokens), HIDDEN)}
    for i in range(LAYERS):
        layer = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (width, HIDDEN), "attn_v": (width, HIDDEN)}
        layer |= {"attn_output": (HIDDEN, HIDDEN), "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        layer |= {"ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    weights = {}
    for name, shape in shapes.items():
        scale = 0.2 * rng.standard_normal(shape)
        weights[f"{name}.weight"] = (1 + scale if len(shape) == 1 else scale).astype(np.float32)
        writer.add_tensor(f"{name}.weight", weights[f"{name}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights
