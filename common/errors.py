"""Errors that a person can act on: one line that says expected, got, where, and what to do."""

from __future__ import annotations


class DSpineError(ValueError):
    """Bad input or an unsupported combination. The command line prints it as one line and exits with code 2."""


class CheckpointError(DSpineError):
    """A config or a tensor file of a checkpoint is missing, damaged, contradictory, or of another kind."""


class BackendError(DSpineError):
    """A runtime or device that was asked for is not there; the message names what is and how to install the other."""


class OutOfMemory(DSpineError):
    """The device has no room for what was asked for, now: less at once, or later, may fit. Not the fault of the input."""
