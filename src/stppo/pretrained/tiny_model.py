"""A random language model of Qwen2.5's shape with a tokenizer of its kind: tries a pipeline without any
download."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from stppo.policy.policy import make_folder, save_policy

END, MESSAGE_START, MESSAGE_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Qwen2.5's dialogue: a system message of its own, then the user's, then the model writes.
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}"
    f"{MESSAGE_START}system\nAnswer questions.{MESSAGE_END}\n"
    "{% endif %}{% for message in messages %}"
    f"{MESSAGE_START}{{{{ message['role'] }}}}\n{{{{ message['content'] }}}}{MESSAGE_END}\n"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{MESSAGE_START}assistant\n{{% endif %}}"
)


def make_tiny_model(
    folder: str | Path,
    texts: Iterable[str],
    vocabulary: int = 2000,
    hidden_size: int = 64,
    layers: int = 2,
    seed: int = 0,
) -> int:
    """Write model and tokenizer to `folder` as `save_pretrained` does; returns the number of parameters.

    As in Qwen2.5 up to 3B: byte-level BPE with its splitting rules, chat messages between control tokens,
    grouped keys, output layer tied to the embeddings, 32,768 positions. Weights are random, so it answers
    nothing. The tokenizer is trained on `texts`; vocabulary: its size with the control tokens. hidden_size: a
    multiple of 64, in heads of 32.

    ValueError where `texts` are empty, or a size is out of range; OSError where the folder cannot be written.
    """
    make_folder(folder)
    if hidden_size < 64 or hidden_size % 64:
        raise ValueError(f"hidden_size must be a multiple of 64, got {hidden_size}")
    if vocabulary < 300:
        raise ValueError(f"vocabulary must be at least 300 (256 bytes and control tokens), got {vocabulary}")
    if layers < 1:
        raise ValueError(f"layers must be at least 1, got {layers}")
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ValueError("texts are empty: the tokenizer is trained on them")
    tokenizer = Qwen2Tokenizer().train_new_from_iterator(
        texts, vocabulary, new_special_tokens=[MESSAGE_START, MESSAGE_END], show_progress=False
    )
    tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template = MESSAGE_END, END, CHAT_TEMPLATE
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (MESSAGE_END, END)]
    heads = hidden_size // 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer),
                hidden_size=hidden_size,
                intermediate_size=4 * hidden_size,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=heads // 2,
                tie_word_embeddings=True,
                rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
                pad_token_id=ends[1],
                eos_token_id=ends[0],
            )
        )
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1])
    save_policy(model, folder, tokenizer)
    return model.num_parameters()
