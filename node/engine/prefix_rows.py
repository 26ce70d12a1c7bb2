"""Rows that begin with a kept prefix, and what is kept of rows: between generator and store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.messages import Admission, Save
from mlx_mesh.mesh.prefix_index import MIN_TOKENS
from mlx_mesh.node.engine.failure import EngineError
from mlx_mesh.node.engine.features import Features
from mlx_mesh.node.engine.prefix_disk import Loaded
from mlx_mesh.node.engine.prefix_planner import Stored
from mlx_mesh.node.engine.prefix_saving import Saving
from mlx_mesh.node.engine.prefix_store import Cache, PrefixStore, begin_with, can_cut
from mlx_mesh.node.engine.row_media import RowMedia
from mlx_mesh.node.engine.whole_prompts import WholeRow


@dataclass(frozen=True, slots=True)
class _Row:
    entry: int
    num_reused: int
    checkpoints: dict[int, int]  # tokens -> entry


class RowPrefixes:
    """The same on every rank, because the plans and the generator's steps are."""

    def __init__(self, generator: BatchGenerator) -> None:
        self.store = PrefixStore()
        self._generator = generator
        self._rows: dict[int, _Row] = {}  # by the generator's number
        self._lengths: dict[int, int] = {}  # tokens of each entry
        self._stored: list[Stored] = []
        self.saving: Saving | None = None  # None = nothing is written to files

    def insert(self, admission: Admission, features: Features | None = None, **options: Any) -> int:
        """Give a row to the generator, as BatchGenerator.insert; returns its number. `features`: of a prompt
        with pictures; its chunks end where the prompt ends, which is before tokens that were sent."""
        prompt, num_reused = list(admission.prompt_ids), admission.num_reused
        if num_reused:
            options["caches"] = [self._beginning(admission)]
            options["all_tokens"] = [prompt[:num_reused]]
        points = [point for point, _ in admission.checkpoints]
        if features is not None:
            options["caches"] = options.get("caches") or [make_prompt_cache(self._generator.model)]
            media = options["caches"][0][-1]
            media.features = [features]
            if features.is_whole:
                media.whole = [WholeRow(tuple(prompt[: features.length]))]
            if num_reused < features.length < len(prompt):
                ends = range(features.length, len(prompt) if features.sees_ahead else features.length + 1)
                points = sorted({*points, *ends})
        edges = itertools.pairwise([num_reused, *points, len(prompt)])
        (uid,) = self._generator.insert_segments([[prompt[a:b] for a, b in edges]], **options)
        self._rows[uid] = _Row(admission.entry, num_reused, dict(admission.checkpoints))
        return int(uid)

    def forget(self, uid: int) -> None:
        """The row is gone."""
        self._rows.pop(uid, None)

    def keep_checkpoints(self, progress: Sequence[Any]) -> None:
        """After a step, with what it says of prompts."""
        for one in progress:
            row = self._rows.get(one.uid)
            if row is None or not one.end_of_segment or one.end_of_prompt:
                continue
            entry = row.checkpoints.get(row.num_reused + one.progress[0])
            if entry is not None:
                cache, tokens = self._extract([one.uid])[one.uid]
                self._keep(entry, cache, tokens)

    def keep_finished(self, response: Any) -> None:
        """The row of a response that has a finish_reason."""
        row = self._rows[response.uid]
        if row.entry:
            self._keep(row.entry, response.prompt_cache, response.all_tokens)

    def keep_rows(self, uids: Sequence[int]) -> None:
        """Rows that are about to be removed, as far as they came."""
        uids = [uid for uid in uids if self._rows[uid].entry]
        for uid, (cache, tokens) in self._extract(uids).items():
            if len(tokens) > self._rows[uid].num_reused:
                self._keep(self._rows[uid].entry, cache, tokens)

    def save(self, save: Save) -> None:
        """Have the beginning of an entry written to a file."""
        cache = self.store.get(save.entry)
        if self.saving is not None and cache is not None:
            with mx.stream(self._generator.stream):
                self.saving.begin(cache, self._lengths[save.entry], save.tokens)

    def begin_with(self, loaded: Sequence[Loaded]) -> list[Stored]:
        """Before anything else: entries from files, the first one last."""
        for entry, one in enumerate(reversed(loaded), 1):
            self._keep(entry, one.cache, one.tokens)
        return self.take_stored()

    def evict(self, entry: int) -> None:
        """Nothing if it is not here."""
        self.store.evict(entry)
        self._lengths.pop(entry, None)

    def take_stored(self) -> list[Stored]:
        stored, self._stored = self._stored, []
        return stored

    def _beginning(self, admission: Admission) -> Cache:
        cache = self.store.get(admission.reuse)
        if cache is not None:
            return begin_with(cache, self._lengths[admission.reuse], admission.num_reused)
        for uid, row in self._rows.items():
            if row.entry == admission.reuse:
                cache, tokens = self._extract([uid])[uid]
                return begin_with(cache, len(tokens), admission.num_reused)
        raise EngineError(
            "internal",
            f"Request {admission.id} is to begin with entry {admission.reuse} of the prefix cache, which "
            "this rank does not have.",
        )

    def _extract(self, uids: Sequence[int]) -> dict[int, tuple[Cache, Sequence[int]]]:
        with mx.stream(self._generator.stream):
            return {uid: tuple(found) for uid, found in self._generator.extract_cache(uids).items()}

    def _keep(self, entry: int, cache: Cache, tokens: Sequence[int]) -> None:
        if len(tokens) < MIN_TOKENS:
            return
        if isinstance(cache[-1], RowMedia):
            tokens = cache[-1].let_go(tokens)
        with mx.stream(self._generator.stream):
            num_bytes = self.store.put(entry, cache)
        self._lengths[entry] = len(tokens)
        self._stored.append(Stored(entry, tuple(tokens), can_cut(cache), num_bytes))
