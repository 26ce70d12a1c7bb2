"""What can go wrong, in words for people: what was seen, where, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit statuses of `mlx-mesh` and of the agent; part of the command line's contract."""

    OK = 0
    FAILED = 1  # something broke while running
    USAGE = 2  # bad arguments, hostfile or settings
    PREFLIGHT = 3  # a host is not ready: ssh, interpreter, version, model
    PLACEMENT = 4  # the model cannot be split or does not fit as asked
    BRING_UP = 5  # a rank did not come up within its deadline
    ALREADY_RUNNING = 6
    NOT_RUNNING = 7
    INTERRUPTED = 130


class MeshError(Exception):
    """Root of every error a user may see. The message is one or more full sentences."""

    exit_code: ExitCode = ExitCode.FAILED


class HostfileError(MeshError, ValueError):
    """The hostfile cannot be used. The message has `file:line:` and the fix."""

    exit_code = ExitCode.USAGE


class SettingsError(MeshError, ValueError):
    """A flag, variable or `.env` value cannot be used."""

    exit_code = ExitCode.USAGE


class PreflightError(MeshError):
    """One or more hosts are not ready; the message lists all of them, a line each."""

    exit_code = ExitCode.PREFLIGHT


class PlacementError(MeshError):
    """The model cannot be split or does not fit as asked; the message says what would work. `missing_bytes`:
    by how much it does not fit, host by host; {} when memory is not the reason."""

    exit_code = ExitCode.PLACEMENT

    def __init__(self, message: str, missing_bytes: Mapping[str, int] | None = None) -> None:
        super().__init__(message)
        self.missing_bytes = dict(missing_bytes or {})


class BringUpError(MeshError):
    """A rank did not reach ready; the message names rank, host, phase and deadline."""

    exit_code = ExitCode.BRING_UP


class AlreadyRunningError(MeshError):
    """A mesh of this name runs; the message has its URL."""

    exit_code = ExitCode.ALREADY_RUNNING


class NotRunningError(MeshError):
    """No mesh of this name runs here."""

    exit_code = ExitCode.NOT_RUNNING


class ProtocolError(MeshError):
    """A peer sent something that is not of this protocol, version, epoch or size."""


class RequestRejected(MeshError):
    """A generation request cannot be taken; `code` is the OpenAI error code, `param` the field."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
