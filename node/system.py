"""Asking the operating system: commands with a deadline, and which system this is."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Sequence

COMMAND_S = 10.0
"""system_profiler takes a second; anything longer than this is as good as no answer."""

SYSTEM_FOLDERS = "/usr/bin:/bin:/usr/sbin:/sbin"
"""A non-interactive shell may have less on its PATH than macOS's own tools need."""


def ask(words: Sequence[str]) -> str:
    """What a command prints on stdout; '' when it is not there, fails, or does not end within COMMAND_S."""
    program = find_program(words[0])
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def find_program(name: str) -> str | None:
    path = os.pathsep.join(filter(None, (os.environ.get("PATH", ""), SYSTEM_FOLDERS)))
    return shutil.which(name, path=path)


@functools.cache
def is_mac() -> bool:
    """By `uname`, like every script of macOS's own."""
    return ask(["uname", "-s"]).strip() == "Darwin"
