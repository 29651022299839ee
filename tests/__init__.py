"""All tests. A package, so that helpers import as ``tests.sim.harness``."""
