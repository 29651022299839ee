"""What can go wrong while a model is brought up.

::

    ValueError
    └── ModelLoadError    the directory, its files or the requested device do not serve this model
"""

from __future__ import annotations


class ModelLoadError(ValueError):
    """A model cannot be loaded as asked. One line: the offending value, and what to do."""
