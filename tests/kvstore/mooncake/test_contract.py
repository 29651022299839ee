"""The Mooncake back end keeps the contract, over a real master and a real segment."""

from __future__ import annotations

import pytest

from tests.kvstore.contract import PageStoreContract

pytestmark = [pytest.mark.net, pytest.mark.shared_processes]


class TestMooncake(PageStoreContract):
    """Nothing of the suite is left out."""
