"""The identity of a model: which KV bytes may stand for which.

Owns the digest that enters every page key. It covers the architecture, all parameters that change
the computation (rope included) and the bytes of every weight, but not how the weights are cut into
files. Two runs share KV only when all of it is equal.

Weights are hashed with xxh3-128 while they are loaded (20 GB/s), the whole with SHA-256. That
separates models against accident, not against somebody who crafts colliding weights.
"""

from __future__ import annotations

import hashlib

import msgspec
import torch
import xxhash

from engine.model_config import ModelConfig
from engine.safetensors_file import byte_view

# Raised when the engine's KV bytes change for the same weights (order of dimensions, layout).
_DOMAIN = "kvferry/fingerprint/1"


class Fingerprint:
    """Collects what identifies a model; ``add`` in any order, then ``hexdigest``."""

    def __init__(self, config: ModelConfig) -> None:
        facts = config._asdict()
        facts["rope"] = config.rope._asdict()
        del facts["eos_token_ids"]  # decides where generation ends, not what KV is
        del facts["max_model_len"]
        self._facts = facts
        self._tensors: dict[str, list[object]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add the bytes of one contiguous CPU tensor as the checkpoint has it."""
        assert name not in self._tensors, name
        digest = xxhash.xxh3_128_hexdigest(byte_view(tensor))
        self._tensors[name] = [name, str(tensor.dtype), list(tensor.shape), digest]

    def hexdigest(self) -> str:
        """Return 64 hexadecimal digits."""
        tensors = [self._tensors[name] for name in sorted(self._tensors)]
        document = msgspec.json.encode([_DOMAIN, self._facts, tensors], order="sorted")
        return hashlib.sha256(document).hexdigest()
