"""Reading the words of one command: its flags are added when it is called, a hostfile or a name may also
stand behind flags, a mistyped flag is told with the command's own usage and the flag that may be meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any


class CommandParser(argparse.ArgumentParser):
    """argparse gives an optional word its default as soon as flags begin, and refuses it behind them."""

    _complete: Callable[[argparse.ArgumentParser], None] | None = None

    def complete_later(self, complete: Callable[[argparse.ArgumentParser], None]) -> None:
        """`complete` adds the flags, before the first words are read."""
        self._complete = complete

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if self._complete is not None:
            self._complete(self)
            self._complete = None
        found, extra = super().parse_known_args(args, namespace)
        unknown = [word for word in extra if word.startswith("-") and word != "-"]
        left = [] if unknown else [word for word in extra if not self._take(found, word)]
        if unknown or left:
            self.error(self._complaint(unknown, left))
        return found, []

    def _take(self, found: argparse.Namespace, word: str) -> bool:
        """Give a word that is left over to a place for words that may still have one."""
        for action in self._actions:
            if action.option_strings or isinstance(action, argparse._SubParsersAction):
                continue
            value = self._get_value(action, word) if action.nargs in ("?", "*", "+") else None
            if action.nargs == "?" and getattr(found, action.dest) == action.default:
                setattr(found, action.dest, value)
                return True
            if action.nargs in ("*", "+"):
                setattr(found, action.dest, [*(getattr(found, action.dest) or []), value])
                return True
        return False

    def _complaint(self, unknown: list[str], left: list[str]) -> str:
        words = []
        for flag in unknown:
            near = difflib.get_close_matches(flag.partition("=")[0], self._option_string_actions, n=1)
            words.append(f"{flag}{f' (did you mean {near[0]}?)' if near else ''}")
        return f"unrecognized arguments: {' '.join(words or left)}"
