"""The contract of every bulk transport, as checks that take a ``World``.

``transports`` lists the transports; ``tests/transfer/test_contract.py`` runs every check on each::

    moving        sizes, ranges, buffers, counters: what an operation does when nothing goes wrong
    limits        at the limits of the configuration, and one beyond
    concurrency   many operations, many peers, a slow one beside a fast one
    tokens        rights, bounds, forgery, revocation, restarts
    endings       deadlines and cancellation: before, during, after
    closing       peers that close, abort, break off and return
    connections   hanging, half-open, idle and cut connections

"During" is made by a ``Hold``, never by sizes or sleeps: the operation stands still, with its first
piece moved, until the check lets it go on.
"""

import pytest

MODULES = ("moving", "limits", "concurrency", "tokens", "endings", "closing", "connections")

pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in (*MODULES, "world")))
