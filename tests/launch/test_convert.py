"""A GGUF file becomes the same model, the same tokenizer and a complete directory, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch import convert
from launch.convert import convert_gguf
from launch.errors import ConfigError
from launch.gguf_config import architecture_of, hf_tensor_name
from launch.gguf_tokenizer import build_tokenizer
from tests.launch.tiny_gguf import smollm_tokenizer, write_tiny

TEXTS = [
    "the quick brown fox",
    "in 2024, 12345 digits",
    "def f(x):\n    return x ** 2\n\t# naïve 你好 🎉",
    "<|im_start|>user\nhi<|im_end|>",
    "  two  spaces  ",
]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_converted_model_gives_the_same_logits(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    tiny = write_tiny(tmp_path / "tiny.gguf", architecture, tied=tied)
    convert_gguf(tiny.file, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.arange(40).reshape(1, 40)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, tiny.model(tokens).logits)
    assert model.config.rms_norm_eps == 1e-5


def test_tokenizer_splits_like_the_original(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "tiny.gguf", "llama")
    convert_gguf(tiny.file, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == tiny.tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
    assert tokenizer("<|im_start|><|im_end|>")["input_ids"] == [1, 2]
    assert tokenizer.eos_token == "<|im_end|>"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_large_models_are_written_as_shards_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SHARD_NBYTES_MAX", 100_000)
    tiny = write_tiny(tmp_path / "tiny.gguf", "llama")
    convert_gguf(tiny.file, tmp_path / "out", dtype="bfloat16")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tiny.model.state_dict()[name].to(torch.bfloat16)), name


def test_a_conversion_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = write_tiny(tmp_path / "tiny.gguf", "llama")

    def broken(name: str) -> str:
        raise ConfigError(f"no {name}")

    monkeypatch.setattr(convert.gguf_config, "hf_tensor_name", broken)
    with pytest.raises(ConfigError, match="no token_embd"):
        convert_gguf(tiny.file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_what_is_not_a_gguf_file_is_refused_in_one_line(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"no gguf" * 100)
    for source, words in ((wrong, "not a readable GGUF"), (tmp_path / "none.gguf", "no such file")):
        with pytest.raises(ConfigError, match=words):
            convert_gguf(source, tmp_path / "out")


def test_an_existing_directory_is_never_overwritten(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "tiny.gguf", "llama")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").touch()
    with pytest.raises(ConfigError, match="exists already"):
        convert_gguf(tiny.file, tmp_path / "out")
    with pytest.raises(ConfigError, match="float8"):
        convert_gguf(tiny.file, tmp_path / "new", dtype="float8")


@pytest.mark.parametrize(
    "meta",
    [
        {"general.architecture": "gemma2"},
        {"general.architecture": "llama", "llama.rope.scaling.type": "yarn"},
        {"general.architecture": "llama", "llama.expert_count": 8},
    ],
)
def test_models_that_would_be_computed_differently_are_refused(meta: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="not supported"):
        architecture_of(meta)


def test_unknown_tensors_and_splits_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        hf_tensor_name("rope_freqs.weight")
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_gate_exps"):
        hf_tensor_name("blk.0.ffn_gate_exps.weight")
    vocabulary = {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": []}
    with pytest.raises(ConfigError, match="tekken"):
        build_tokenizer(
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken", **vocabulary}
        )
    with pytest.raises(ConfigError, match=r"tokenizer\.json beside"):
        build_tokenizer({"tokenizer.ggml.model": "llama"})


def test_an_original_tokenizer_beside_the_file_wins(tmp_path: Path) -> None:
    tiny = write_tiny(tmp_path / "tiny.gguf", "llama")
    original = smollm_tokenizer()
    original.add_special_tokens(["<|mark|>"])
    original.save(str(tmp_path / "tokenizer.json"))
    convert_gguf(tiny.file, tmp_path / "out")
    kept = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert kept == (tmp_path / "tokenizer.json").read_bytes()
