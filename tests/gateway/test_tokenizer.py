"""Claims about tokenizers, against the ``tokenizers`` library on vocabularies trained here."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from gateway.chat_template import ChatTemplate, ChatTemplateError
from gateway.detokenizer import Detokenizer
from gateway.tokenizer import ByteTokenizer, HfTokenizer, load_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "naïve café 日本語 🎉 ünïcödé",
    "a b c",
] * 20
SPECIAL = ["<|bos|>", "<|eos|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'tool' %}\n"
    "        {{ raise_exception('no tools') }}\n"
    "    {% endif %}\n"
    "[{{ message.role }}] {{ message.content | trim }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_byte_level(directory: Path) -> Tokenizer:
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(CORPUS, trainer)
    fast.add_tokens([AddedToken("<think>", special=False)])
    fast.enable_truncation(4)
    fast.save(str(directory / "tokenizer.json"))
    return fast


def write_sentencepiece(directory: Path) -> Tokenizer:
    """The Llama-2 shape: ``▁`` for spaces, bytes as ``<0xNN>``."""
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁ab", "ab"]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    merges = [("a", "b"), ("▁", "a"), ("▁", "ab")]
    fast = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    fast.add_special_tokens(SPECIAL)
    fast.save(str(directory / "tokenizer.json"))
    return fast


def write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


@pytest.fixture
def byte_level(tmp_path: Path) -> HfTokenizer:
    write_byte_level(tmp_path)
    config = {
        "bos_token": {"content": "<|bos|>"},
        "eos_token": "<|eos|>",
        "chat_template": TEMPLATE,
    }
    write_json(tmp_path / "tokenizer_config.json", config)
    return HfTokenizer(tmp_path)


def incremental(tokenizer: HfTokenizer, tokens: list[int], *, skip: bool) -> str:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return "".join(detokenizer.push(token) for token in tokens) + detokenizer.flush()


@pytest.mark.parametrize("skip", [False, True])
def test_incremental_text_equals_decode_for_any_tokens(byte_level: HfTokenizer, skip: bool) -> None:
    rng = random.Random(5)
    for _ in range(500):
        tokens = [rng.randrange(byte_level.vocab_size) for _ in range(rng.randrange(1, 12))]
        if skip or not set(tokens) & {0, 1, byte_level.vocab_size - 1}:
            tokens = [token for token in tokens if token != byte_level.vocab_size - 1]
            expected = byte_level.decode(tokens, skip_special_tokens=skip)
            assert incremental(byte_level, tokens, skip=skip) == expected


@pytest.mark.parametrize("text", CORPUS[:3])
def test_encode_then_decode_is_the_text_and_nothing_is_truncated(
    byte_level: HfTokenizer, text: str
) -> None:
    tokens = byte_level.encode(text)
    assert len(tokens) > 2
    assert incremental(byte_level, tokens, skip=True) == text


def test_special_tokens_show_only_when_asked_and_added_tokens_always(
    byte_level: HfTokenizer,
) -> None:
    tokens = byte_level.encode("a<think>é<|eos|>")
    assert incremental(byte_level, tokens, skip=True) == "a<think>é"
    assert incremental(byte_level, tokens, skip=False) == "a<think>é<|eos|>"


def test_sentencepiece_bytes_and_spaces_equal_decode(tmp_path: Path) -> None:
    fast = write_sentencepiece(tmp_path)
    tokenizer = HfTokenizer(tmp_path)
    rng = random.Random(6)
    valid = list("é日🎉".encode())
    for _ in range(200):
        words = [rng.choice([[259], [260, 261], [262], [263], [264]]) for _ in range(4)]
        tokens = [t for word in words for t in word]
        at = rng.randrange(len(tokens))
        tokens[at:at] = [3 + byte for byte in valid]
        assert incremental(tokenizer, tokens, skip=True) == fast.decode(tokens)


def test_ids_without_a_token_have_no_text(byte_level: HfTokenizer) -> None:
    assert byte_level.token_bytes(100_000) == b""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config.json": {"eos_token_id": [5, 7]}}, (5, 7)),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 9}}, (9,)),
        ({"config.json": {"text_config": {"eos_token_id": 4}}}, (4,)),
        ({"tokenizer_config.json": {"eos_token": "<|eos|>"}}, (1,)),
        ({}, ()),
    ],
)
def test_eos_comes_from_the_first_file_that_states_it(
    tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]
) -> None:
    write_byte_level(tmp_path)
    for name, document in files.items():
        write_json(tmp_path / name, document)
    assert HfTokenizer(tmp_path).eos_token_ids == expected


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json does not exist"):
        load_tokenizer(tmp_path)
    write_byte_level(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_tokenizer(tmp_path)


def test_the_template_file_wins_and_named_templates_have_a_default(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert HfTokenizer(tmp_path).apply_chat_template([]) == "d"
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert HfTokenizer(tmp_path).apply_chat_template([]) == "file"


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        HfTokenizer(tmp_path).apply_chat_template([])


def test_templates_follow_the_hugging_face_conventions(byte_level: HfTokenizer) -> None:
    messages = [{"role": "user", "content": " hi "}]
    text = byte_level.apply_chat_template(messages)
    assert text == "<|bos|>[user] hi\n[assistant]"
    assert byte_level.apply_chat_template(messages, add_generation_prompt=False).endswith("hi\n")
    with pytest.raises(ChatTemplateError, match="no tools"):
        byte_level.apply_chat_template([{"role": "tool", "content": ""}])


def test_template_helpers_are_there() -> None:
    source = (
        "{{ strftime_now('%Y') }}|{{ {'a': '<é>'} | tojson }}|"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}|"
        "{% generation %}g{% endgeneration %}|{{ enable_thinking }}"
    )
    template = ChatTemplate(source, {}, now=lambda: datetime(2031, 1, 1))
    shown = template.render([], extra={"enable_thinking": False})
    assert shown == '2031|{"a": "<é>"}|01|g|False'


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ undefined.attribute }}",
    ],
)
def test_templates_run_in_a_sandbox(source: str) -> None:
    template = ChatTemplate(source, {})
    try:
        shown = template.render([])
    except ChatTemplateError:
        return
    assert shown == ""


def test_a_template_that_does_not_compile_is_refused_at_load() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_the_byte_tokenizer_round_trips() -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode("hé 🎉")
    assert tokens[0] == 256
    assert tokenizer.decode(tokens) == "hé 🎉"
    assert tokenizer.encode("a", add_special_tokens=False) == [97]
    assert tokenizer.eos_token_ids == (257,)


def test_the_gateway_loads_neither_torch_nor_transformers_and_stays_small() -> None:
    script = (
        "import sys, psutil, gateway, uvicorn\n"
        "banned = [m for m in ('torch', 'transformers') if m in sys.modules]\n"
        "rss = psutil.Process().memory_info().rss >> 20\n"
        "print(banned, rss)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    banned, rss = done.stdout.rsplit(" ", 1)
    assert banned == "[]"
    assert int(rss) < 150, "MB, before any tokenizer or index"
