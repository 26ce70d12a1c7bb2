"""Generated text cut at the model's tags, incrementally: answer, reasoning, calls.

The result does not depend on where the text is cut into pieces: text that may become a tag is held back,
and so is white space, because what stands next to a tag belongs to the tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_mesh.proxy.markup import Markup, Region
from mlx_mesh.proxy.toolcalls import MAX_CALL_CHARS, ToolCall, read_calls


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text of one region that may be given out; `start` counts all characters of the generated text,
    with tags."""

    region: Region
    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Calls:
    calls: tuple[ToolCall, ...]


Found = Stretch | Calls


class Splitter:
    """One sequence. `tools`: the request's; () = calls are not looked for. `region`: where the prompt
    ends."""

    def __init__(self, markup: Markup, region: Region, tools: Sequence[dict[str, Any]] = ()) -> None:
        self._edges = markup.transitions(with_calls=bool(tools))
        self._is_plain = not self._edges
        self._markup = markup
        self._tools = tools
        self.region = region
        self._buffer = ""  # not given out yet
        self._start = 0  # of the buffer
        self._after_tag = region is not Region.ANSWER
        self._call_from = Region.ANSWER  # where the open call began
        self._call_text: list[str] = []  # of the open call, without what is in the buffer
        self._num_call_chars = 0
        self._call_tag = ""
        self._call_start = 0
        self._space = ""  # before the last tag

    @property
    def is_after_tag(self) -> bool:
        """Nothing of the region was given out yet."""
        return self._after_tag

    def add(self, text: str) -> list[Found]:
        """What the text lets out."""
        if self._is_plain:
            return self._take(text)
        self._buffer += text
        found: list[Found] = []
        while (match := self._first_tag()) is not None:
            at, tag, into = match
            region = self.region
            found += self._advance(at, is_before_tag=True)
            if self.region is region:  # else: a call grew too long, and is text now
                found += self._cross(tag, into)
        num_held = self._num_to_hold()
        found += self._advance(len(self._buffer) - num_held, is_before_tag=False)
        return found

    def finish(self, is_cut: bool) -> list[Found]:
        """No more text comes; `is_cut`: by a limit, so that an open call is not complete."""
        found = self._advance(len(self._buffer), is_before_tag=False)
        if self.region is Region.CALL:
            found += self._close_call("", is_cut=is_cut and bool(self._markup.call_end))
        if self._buffer:  # white space
            found += self._take_held()
        return found

    # ------------------------------------------------------------ regions

    def _cross(self, tag: str, into: Region) -> list[Found]:
        """Leave the region by the tag at the buffer's start."""
        if self.region is Region.CALL:
            self._consume(len(tag))
            return self._close_call(tag, is_cut=False, into=into)
        if into is Region.CALL:
            self._call_from, self._call_tag = self.region, self._space + tag
            self._call_text, self._num_call_chars = [], 0
            self._call_start = self._start - len(self._space)
        self._consume(len(tag))
        self.region = into
        self._after_tag = True
        return []

    def _close_call(self, tag: str, *, is_cut: bool, into: Region = Region.ANSWER) -> list[Found]:
        assert self._markup.parse_calls is not None
        text = "".join(self._call_text)
        calls = None if is_cut else read_calls(self._markup.parse_calls, text, self._tools)
        if calls is not None:
            self.region = into
            self._after_tag = True
            return [Calls(calls)]
        whole = self._call_tag + text + tag
        self.region = self._call_from if self._call_from is not Region.HEADER else Region.ANSWER
        self._after_tag = False
        return [Stretch(self.region, whole, self._call_start)]

    def _advance(self, end: int, *, is_before_tag: bool) -> list[Found]:
        """Take the buffer up to `end`, as text of the region."""
        self._space = ""
        if self.region is Region.CALL:
            self._call_text.append(self._buffer[:end])
            self._num_call_chars += end
            self._consume(end)
            if self._num_call_chars > MAX_CALL_CHARS:
                return self._close_call("", is_cut=True)
            return []
        if self.region is Region.HEADER:
            self._consume(end)
            return []
        text = self._buffer[:end]
        if self._after_tag:
            stripped = text.lstrip()
            self._consume(len(text) - len(stripped))
            end -= len(text) - len(stripped)
            text = stripped
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if not kept:
            if is_before_tag:
                self._consume(end)
            return []
        self._after_tag = False
        found: list[Found] = [Stretch(self.region, kept, self._start)]
        self._consume(end if is_before_tag else len(kept))
        return found

    def _take_held(self) -> list[Found]:
        text, start, region = self._buffer, self._start, self.region
        self._consume(len(text))
        if self._after_tag or region is not Region.ANSWER:
            return []
        return [Stretch(region, text, start)]

    def _take(self, text: str) -> list[Found]:
        start = self._start
        self._start += len(text)
        return [Stretch(self.region, text, start)] if text else []

    def _consume(self, num_chars: int) -> None:
        self._buffer = self._buffer[num_chars:]
        self._start += num_chars

    # ------------------------------------------------------------ tags

    def _first_tag(self) -> tuple[int, str, Region] | None:
        """The tag that completes first, of two that complete together the longer one."""
        found = [
            (at, tag, into)
            for tag, into in self._edges.get(self.region, ())
            if (at := self._buffer.find(tag)) >= 0
        ]
        return min(found, key=lambda one: (one[0] + len(one[1]), one[0]), default=None)

    def _num_to_hold(self) -> int:
        """Length of the longest end of the buffer that begins a tag."""
        tags = [tag for tag, _ in self._edges.get(self.region, ())]
        longest = max(map(len, tags), default=1) - 1
        for size in range(min(longest, len(self._buffer)), 0, -1):
            tail = self._buffer[len(self._buffer) - size :]
            if any(tag.startswith(tail) for tag in tags):
                return size
        return 0
