"""A tiny model of each architecture as a GGUF file, and the transformers model it was made from.

Owns the way llama.cpp writes a file (row permutation, names, metadata), so that conversion is
tested against an independent construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

CONTROL, NORMAL = 3, 1
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = ["the quick brown fox jumps over the lazy dog 0123456789", "def f(x):\n    return x ** 2\n"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


class TinyModel(NamedTuple):
    """A GGUF file and what it must become."""

    file: Path
    model: Any
    tokenizer: Tokenizer


def smollm_tokenizer() -> Tokenizer:
    """A byte-level BPE split the way SmolLM2's own ``tokenizer.json`` splits."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    return tokenizer


def write_tiny(path: Path, architecture: str, *, tied: bool = True) -> TinyModel:
    """Write a random model of ``architecture`` as float32 GGUF."""
    tokenizer = smollm_tokenizer()
    torch.manual_seed(7)
    config = CONFIGS[architecture](
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, config, tokenizer)
    for name, values in _tensors(model, config, architecture):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyModel(path, model, tokenizer)


def _write_metadata(writer: gguf.GGUFWriter, config: Any, tokenizer: Tokenizer) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in SPECIAL else NORMAL for token in tokens])
    writer.add_token_merges(_merges(tokenizer))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _merges(tokenizer: Tokenizer) -> list[str]:
    import json

    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _tensors(
    model: Any, config: Any, architecture: str
) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.float32]]]]:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}.get(
            architecture, gguf.MODEL_ARCH.QWEN3
        ),
        config.num_hidden_layers,
    )
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        short = names.get_name(stem)
        assert short is not None, name
        values = tensor.detach().numpy().astype(np.float32)
        part = short.split(".")[-1]
        if architecture == "llama" and part in heads:
            values = _permute(values, heads[part])
        yield f"{short}.{kind}", np.ascontiguousarray(values)


def _permute(rows: Any, num_heads: int) -> Any:
    """As llama.cpp's convert_hf_to_gguf.py does."""
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
