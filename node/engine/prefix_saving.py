"""From a kept prefix to a file, without holding up a step: copies are begun, and written when done."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlx_mesh.node.engine.prefix_disk import DiskWriter, Job, UnusableFile, key_of, pack, say
from mlx_mesh.node.engine.prefix_store import Cache, begin_with

STEPS_UNTIL_DONE = 3
"""A copy that is begun in a step is done when this many more have ended: steps compute in order."""


@dataclass(slots=True)
class _Begun:
    job: Job
    num_steps: int = 0


class Saving:
    """The main thread's side of a DiskWriter."""

    def __init__(self, writer: DiskWriter) -> None:
        self._writer = writer
        self._begun: list[_Begun] = []
        self._is_possible = True

    def begin(self, cache: Cache, num_kept: int, tokens: tuple[int, ...]) -> None:
        """Save the first tokens of a cache of `num_kept`, unless there is a file of them."""
        if not self._is_possible or self._writer.folder.touch(key_of(tokens)):
            return
        try:
            packed = pack(begin_with(cache, num_kept, len(tokens)))
        except UnusableFile as error:  # of this model none will do; answers do not depend on files
            say(f"nothing is kept on disk: {error}")
            self._is_possible = False
            return
        mx.async_eval(packed.arrays)
        self._begun.append(_Begun(Job(tokens, packed)))

    def step_ended(self, *, is_idle: bool) -> None:
        """`is_idle`: nothing is under way on this rank any more."""
        for one in self._begun:
            one.num_steps += 1
        while self._begun and (is_idle or self._begun[0].num_steps > STEPS_UNTIL_DONE):
            job = self._begun.pop(0).job
            mx.eval(job.packed.arrays)
            self._writer.write(job)

    def close(self) -> None:
        """Nothing is under way on this rank any more."""
        self.step_ended(is_idle=True)
        self._writer.close()
