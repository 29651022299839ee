"""All tests. A package, so that helpers import as ``tests.simulation.harness``."""
