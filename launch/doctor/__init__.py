"""``kvferry doctor``: whether every transfer path is there, right and as fast as it can be.

``command`` runs it. ``grid``, ``rows``, ``verdict`` and ``pattern`` are pure; ``server`` is the far
side, ``session`` and ``measure`` the near one; ``limits`` is what the figures are held against.
"""
