"""What goes wrong on one machine, each told in one line that says what to do next."""

from __future__ import annotations


class HomeError(Exception):
    """The system can't start or go on. The message is one line: what is wrong, and what to do next."""


class HomeInUseError(HomeError):
    """Another `pennyweight up` holds this home."""


class DiskFullError(HomeError):
    """No space left where the home lies."""


class UnsupportedPlatformError(HomeError):
    """No wheel with the embedded servers fits this machine."""
