"""The errors that end a ``kvferry`` command, and their exit codes.

Owns the one-line convention: every message names the value that is wrong and the remedy, fits one
line, and is printed as ``kvferry: error: <message>``. Knows no command.

::

    LaunchError
    ├── ConfigError   exit 2: what was asked for cannot work; starting it again cannot either
    ├── StartError    exit 1: the world said no (nobody answers, a child died, out of memory)
    └── NothingHeld   exit 4: it was done, and there was nothing to do it to

(3 is ``kvferry doctor``'s: measured, and not what was required.)
"""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_NOTHING = 4
EXIT_ABORTED = 130  # second signal: stopped at once, nothing drained


class LaunchError(Exception):
    """Root: a message for people, on one line."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(LaunchError):
    """What was asked for cannot work as it is; a restart would fail in the same way."""

    exit_code = EXIT_CONFIG


class StartError(LaunchError):
    """It could have worked, but the world said no."""


class NothingHeld(LaunchError):
    """What was asked for was done to nothing: mostly a name that is misspelled."""

    exit_code = EXIT_NOTHING
