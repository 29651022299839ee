"""launch: the ``kvferry`` command. Starts, watches and converts; owns no tokens and no pages.

Every process of a cluster is built here and nowhere else: the other packages are constructed with
what they need and never read the command line, the environment or a configuration file.

Importing this package imports neither torch nor transformers.
"""

__version__ = "0.1.0"
