"""Text to tokens and back, without torch and without transformers.

Owns the ``Tokenizer`` interface, ``HfTokenizer`` (a Hugging Face directory: ``tokenizer.json``
through the ``tokenizers`` library, templates through ``gateway/chat_template.py``) and
``ByteTokenizer`` for the fake model. Knows no requests.

``transformers`` imports torch; a gateway must stay small, so nothing here imports it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as FastTokenizer

from gateway.chat_template import ChatTemplate, ChatTemplateError, Message

FAKE_MODEL = "fake"
FAKE_VOCAB_SIZE = 259
FAKE_BOS = 256
FAKE_EOS = 257

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_FAKE_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Tokenizer(Protocol):
    """What the gateway asks of a tokenizer. Token ids are below ``vocab_size``."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a generation, from generation_config.json, config.json or the tokenizer."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def is_special(self, token: int) -> bool: ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text (encode it with ``add_special_tokens=False``).

        Raises:
            ChatTemplateError: there is no template, or it refuses the messages.
        """
        ...


class ByteTokenizer:
    """Vocabulary of the fake model: 0..255 bytes, 256 BOS, 257 EOS, 258 unused."""

    vocab_size = FAKE_VOCAB_SIZE
    eos_token_ids = (FAKE_EOS,)

    def __init__(self) -> None:
        self._template = ChatTemplate(_FAKE_TEMPLATE, {})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokens = list(text.encode("utf-8", "surrogatepass"))
        return [FAKE_BOS, *tokens] if add_special_tokens else tokens

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token for token in tokens if token < FAKE_BOS).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes((token,)) if 0 <= token < FAKE_BOS else b""

    def is_special(self, token: int) -> bool:
        return token >= FAKE_BOS

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, extra=extra
        )


class HfTokenizer:
    """A Hugging Face model directory.

    Raises:
        ValueError: on construction, when a file is missing or unreadable; names it and the remedy.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist: a fast tokenizer is needed; "
                "convert the model with `kvferry model convert`"
            )
        self._fast = FastTokenizer.from_file(str(path))
        self._fast.no_truncation()
        self._fast.no_padding()
        config = _read_json(directory / "tokenizer_config.json")
        self.vocab_size = self._fast.get_vocab_size(with_added_tokens=True)
        added = self._fast.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._literal = {id: token.content.encode() for id, token in added.items()}
        self._byte_level = _is_byte_level(json.loads(path.read_text("utf-8")))
        self._bytes: dict[int, bytes] = {}
        self.eos_token_ids = _eos_token_ids(directory, config, self._fast)
        self._template = _load_template(directory, config)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._fast.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._token_bytes(token)
        return known

    def is_special(self, token: int) -> bool:
        return token in self._special

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        if self._template is None:
            raise ChatTemplateError("this model has no chat template: use /v1/completions")
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, extra=extra
        )

    def _token_bytes(self, token: int) -> bytes:
        if token in self._literal:
            return self._literal[token]
        piece = self._fast.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            return bytes(_UNICODE_TO_BYTE.get(char, 0x3F) for char in piece)
        byte = _BYTE_TOKEN.fullmatch(piece)
        if byte:
            return bytes((int(byte[1], 16),))
        return str(piece).replace("▁", " ").encode()


def load_tokenizer(model: str | Path) -> Tokenizer:
    """Return the tokenizer of a model directory, or of the fake model for ``"fake"``."""
    if str(model) == FAKE_MODEL:
        return ByteTokenizer()
    return HfTokenizer(Path(model))


def _unicode_to_byte() -> dict[str, int]:
    """Inverse of GPT-2's byte-to-unicode table: printable bytes are themselves, the others were
    moved to 256 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    moved = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + offset): byte for offset, byte in enumerate(moved)})
    return table


_UNICODE_TO_BYTE = _unicode_to_byte()


def _is_byte_level(document: dict[str, Any]) -> bool:
    decoder = document.get("decoder") or {}
    steps = decoder.get("decoders") or [decoder]
    return any(step.get("type") == "ByteLevel" for step in steps)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _eos_token_ids(directory: Path, config: dict[str, Any], fast: FastTokenizer) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        document = _read_json(directory / name)
        value = document.get("eos_token_id", document.get("text_config", {}).get("eos_token_id"))
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(item) for item in value)
    text = _token_text(config.get("eos_token"))
    token = fast.token_to_id(text) if text else None
    return () if token is None else (token,)


def _token_text(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _load_template(directory: Path, config: dict[str, Any]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source: object = config.get("chat_template")
    if path.is_file():
        source = path.read_text("utf-8")
    if isinstance(source, list):  # several named templates: the default one
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default", next(iter(named.values()), None))
    if not isinstance(source, str):
        return None
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    texts = {name: _token_text(config.get(name)) for name in names}
    return ChatTemplate(source, {name: text for name, text in texts.items() if text is not None})
