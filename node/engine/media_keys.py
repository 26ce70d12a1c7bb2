"""What the tokens of a prompt are known by in prefix caches: text by its ids, the rest by its content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_mesh.node.engine.features import Features

PICTURE_KEY = 1 << 31
"""Keys of tokens that are no text begin here; no vocabulary comes near. Below 1 << 32."""


@dataclass(frozen=True, slots=True)
class Items:
    """What a prompt has of one kind of media: the ids that stand for its tokens, and for each run of them
    the content of what stands there, with everything that the model makes something else of it by."""

    marks: frozenset[int]
    contents: tuple[bytes, ...]


def spread(ids: Sequence[int], length: int, marks: frozenset[int]) -> list[int]:
    """Ids with as many entries as there are embeddings: some models take one mark for a whole picture. The
    new ones stand where the last mark is, or at the end. Marks that stand for nothing are left out, the last
    ones first. Raises ValueError when there are not that many."""
    missing = length - len(ids)
    if missing <= 0:
        gone = {i for i, token in enumerate(ids) if token in marks}
        gone = set(sorted(gone)[len(gone) + missing :]) if missing else set()
        if len(gone) != -missing:
            raise ValueError(f"there are {len(ids)} tokens for {length} embeddings")
        return [token for i, token in enumerate(ids) if i not in gone]
    at = max((i for i, token in enumerate(ids) if token in marks), default=len(ids) - 1)
    return [*ids[:at], *([ids[at]] * missing), *ids[at:]]


def runs_of(ids: Sequence[int], marks: frozenset[int]) -> list[range]:
    """Where marks stand side by side."""
    runs: list[range] = []
    for i, token in enumerate(ids):
        if token not in marks:
            continue
        if runs and runs[-1].stop == i:
            runs[-1] = range(runs[-1].start, i + 1)
        else:
            runs.append(range(i, i + 1))
    return runs


def keys_of(ids: Sequence[int], kinds: Sequence[Items], features: Features) -> tuple[int, ...]:
    """By token. Where runs of a kind's marks are as many as its items, a token is known by the content, the
    number of the item's tokens, which in some families depends on the other pictures, and the place among
    them; else by its embedding with its position, which is right whatever a family does, but may differ by
    the other pictures of the prompt."""
    keys = list(ids)
    unknown: set[int] = set()
    kinds = [kind for kind in kinds if kind.contents]
    shared = {
        mark for kind in kinds for other in kinds if kind is not other for mark in kind.marks & other.marks
    }
    for kind in kinds:
        runs = runs_of(ids, kind.marks)
        if not runs:
            unknown.update(range(len(ids)))
        elif len(runs) != len(kind.contents) or shared & kind.marks:
            unknown.update(i for run in runs for i in run)
        else:
            for run, content in zip(runs, kind.contents, strict=True):
                digest = hashlib.blake2b(b"%d " % len(run) + content, digest_size=16).digest()
                for place, at in enumerate(run):
                    keys[at] = _key(digest + place.to_bytes(4, "little"))
    if unknown:
        embeds = np.array(features.fields["inputs_embeds"].astype(mx.float32))[0]
        given = features.fields.get("position_ids")
        positions = np.zeros((1, len(ids))) if given is None else np.array(given).reshape(-1, len(ids))
        for i in unknown:
            keys[i] = _key(embeds[i].tobytes() + positions[:, i].tobytes())
    return tuple(keys)


def _key(content: bytes) -> int:
    digest = hashlib.blake2b(content, digest_size=4).digest()
    return PICTURE_KEY | int.from_bytes(digest, "little") >> 1
