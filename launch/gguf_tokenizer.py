"""The tokenizer of a GGUF file as ``tokenizer.json`` and ``tokenizer_config.json``.

Owns the construction of a byte-level BPE from the vocabulary and merges that a GGUF file carries.
The split of text into words is not in the file, only its *name* (``tokenizer.ggml.pre``); each
name known here has the same pattern as the original ``tokenizer.json``. An unknown name is
refused: a wrong split gives other tokens without any error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from launch.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_SPLITS = {"qwen2": _QWEN2, "llama-bpe": _LLAMA3, "llama3": _LLAMA3}


def _pre_tokenizer(name: str) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    if name in ("smollm", "smollm2"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name in ("gpt-2", "gpt2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[name]), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, level])
    known = ", ".join(sorted(["smollm", "gpt-2", *_SPLITS]))
    raise ConfigError(
        f"GGUF pre-tokenizer {name!r} is not known (known: {known}): "
        "put the model's original tokenizer.json beside the GGUF file"
    )


def build_tokenizer(meta: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a GGUF file.

    Raises:
        ConfigError: not a byte-level BPE, or a split that is not known.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models

    kind = meta.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(
            f"GGUF tokenizer {kind!r} is not a byte-level BPE: "
            "put the model's original tokenizer.json beside the GGUF file"
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(str(meta.get("tokenizer.ggml.pre", "default")))
    tokenizer.decoder = decoders.ByteLevel()
    types = meta.get("tokenizer.ggml.token_type", [1] * len(tokens))
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    _add_bos(tokenizer, meta)
    return tokenizer


def _add_bos(tokenizer: Tokenizer, meta: Mapping[str, Any]) -> None:
    """Prefix every text with BOS when the file says so."""
    from tokenizers import processors

    bos_id = meta.get("tokenizer.ggml.bos_token_id")
    if not meta.get("tokenizer.ggml.add_bos_token", False) or bos_id is None:
        return
    bos = meta["tokenizer.ggml.tokens"][bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )


def tokenizer_config(meta: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    """Return ``tokenizer_config.json``: named special tokens and the chat template."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in meta:
        config["chat_template"] = meta["tokenizer.chat_template"]
    return config
