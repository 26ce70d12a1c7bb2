"""Where an engine stood: faulthandler's output in one line. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

MAX_FRAMES = 4

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)$')


def where_it_stood(lines: Sequence[str]) -> str:
    """The innermost frames of the main thread, which faulthandler prints last: "recv (plans.py:190) < next
    (loop.py:262)". '' when there is no dump in `lines`."""
    last: list[str] = []
    is_in_thread = False
    for line in lines:
        if _THREAD.match(line.strip()):
            last, is_in_thread = [], True
        elif is_in_thread and (frame := _FRAME.match(line)):
            last.append(f"{frame['function']} ({PurePath(frame['file']).name}:{frame['line']})")
    return " < ".join(last[:MAX_FRAMES])


def without_stacks(lines: Sequence[str]) -> list[str]:
    """What the engine said before somebody asked where it stood."""
    return [line for line in lines if not _THREAD.match(line.strip()) and not _FRAME.match(line)]
