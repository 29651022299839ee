"""What a node that runs the engine says of itself when it joins a cluster.

Owns the names of the facts. The contract must be equal among all nodes of a cluster and is checked
at every hello; labels are for whoever routes, admits and looks on. Free of torch.
"""

from __future__ import annotations

import os

from engine.step import ModelInfo, Runner


def contract_of(info: ModelInfo) -> dict[str, str]:
    """Facts in which all prefill and decode nodes of a cluster agree."""
    return {**info.spec.describe(), "fingerprint": info.fingerprint, "model": info.name}


def labels_of(runner: Runner) -> dict[str, str]:
    """Facts of this process; the scratch page is not counted."""
    info, pool = runner.info, runner.pool
    return {
        "max_model_len": str(info.max_model_len),
        "vocab_size": str(info.vocab_size),
        "eos_token_ids": ",".join(str(token) for token in sorted(info.eos_token_ids)),
        "device": str(pool.storage.device),
        "pid": str(os.getpid()),
        "num_pages": str(pool.num_pages - 1),
        "page_nbytes": str(info.spec.page_nbytes),
    }
