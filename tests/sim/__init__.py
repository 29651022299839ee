"""Deterministic simulation of a whole cluster: the real node code, a virtual world.

Import as ``tests.sim.harness`` (the repository root is on pytest's path). Scenarios use
``run_sim`` and the ``SimCluster`` it passes; see ``harness.py``.
"""
