"""Mooncake's Python module as kvferry uses it: how it is loaded, and what its codes mean.

Owns the typed face of the calls in use (all block; all release the interpreter), the settings of
the library that are read from the environment, and the result codes. Knows no pages.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol

PACKAGE = "mooncake-transfer-engine-non-cuda"
SYSTEM_LIBRARIES = "libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2"

# Result codes of the library; what is negative and not named here is an internal error.
NO_SPACE = -200
INVALID = -600  # also: the object does not fit into the buffer
NOT_READY = -703  # reserved by a writer who has not committed
NOT_FOUND = -704
EXISTS = -705  # committed or reserved
TRANSFER_FAILED = -800
RPC_FAILED = -900

ABSENT_CODES = frozenset((NOT_READY, NOT_FOUND))
# The library gives a transfer up after 60 s, as TRANSFER_FAIL, and has been seen to write into the
# caller's memory a minute later. Failures that come sooner (connection refused) leave nothing.
HUNG_S = 20.0
PIN_S_MAX = 86_400.0  # a master refuses more, unless it was told otherwise

# The library's defaults: 20 attempts (91 s) to reach a master, 30 s per request to it.
_ENVIRONMENT = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_LOG_LEVEL": "WARNING",
    "GLOG_minloglevel": "1",
}


class MooncakeUnavailable(Exception):
    """The library cannot be loaded; the message says what to install."""


class NativeStore(Protocol):
    """The calls of ``MooncakeDistributedStore`` in use. A negative result is a code from above."""

    def setup(self, *args: Any) -> int: ...

    def close(self) -> int: ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def unregister_buffer(self, buffer_ptr: int) -> int: ...

    def batch_is_exist(self, keys: list[str]) -> list[int]: ...

    def batch_get_into(
        self, keys: list[str], buffer_ptrs: list[int], sizes: list[int]
    ) -> list[int]: ...

    def get_into_ranges(
        self,
        buffer_ptrs: list[int],
        all_keys: list[list[str]],
        all_dst_offsets: list[list[list[int]]],
        all_src_offsets: list[list[list[int]]],
        all_sizes: list[list[list[int]]],
    ) -> list[list[list[int]]]: ...

    def batch_put_session_start(
        self, keys: list[str], sizes: list[int], config: Any
    ) -> list[int]: ...

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: list[str],
        all_buffer_ptrs: list[list[int]],
        all_sizes: list[list[int]],
        all_dst_offsets: list[list[int]],
    ) -> list[int]: ...

    def batch_put_session_end(self, keys: list[str]) -> list[int]: ...

    def batch_put_session_revoke(self, keys: list[str]) -> list[int]: ...

    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...

    def remove_by_regex(self, regex_pattern: str, force: bool) -> int: ...


class Library:
    """The loaded module.

    Raises:
        MooncakeUnavailable: it is not installed, or a system library is missing.
    """

    def __init__(self) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            self._module: Any = importlib.import_module("mooncake.store")
        except ModuleNotFoundError as error:
            raise MooncakeUnavailable(
                f"the Mooncake library is not installed: pip install {PACKAGE}"
            ) from error
        except ImportError as error:
            raise MooncakeUnavailable(
                f"the Mooncake library does not load ({error}): install the system libraries "
                f"{SYSTEM_LIBRARIES}"
            ) from error
        if not hasattr(self._module.MooncakeDistributedStore, "batch_put_session_start"):
            raise MooncakeUnavailable(
                f"the Mooncake library is too old: pip install --upgrade '{PACKAGE}>=0.3.13'"
            )

    def new_store(self) -> NativeStore:
        store: NativeStore = self._module.MooncakeDistributedStore()
        return store

    def replicate_config(self, *, replicas: int, pin: bool, pin_s: float | None) -> Any:
        """How a page is kept: copies, and whether it goes after all unpinned ones."""
        config = self._module.ReplicateConfig()
        config.replica_num = replicas
        if pin:
            config.soft_pin_action = self._module.SoftPinAction.ENABLE
            if pin_s is not None:  # else as long as the master grants by itself
                config.soft_pin_ttl_ms = max(1, int(min(pin_s, PIN_S_MAX) * 1000))
        return config
