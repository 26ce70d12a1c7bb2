"""`python -m mlx_mesh.node.delivery.look`: what this host has of a model. LookOrder in, Looked out.

A folder that the user put here is only read, and used as it is when it is complete. One that mlx-mesh made
is put right: pieces that are not what was received are given up.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mlx_mesh.mesh.delivery import Holding, ModelFile
from mlx_mesh.mesh.delivery_orders import Looked, LookOrder, Reading
from mlx_mesh.mesh.errors import MeshError, PreflightError
from mlx_mesh.mesh.spans import covers
from mlx_mesh.node.delivery.part_folder import (
    free_bytes,
    read_part,
    settle_part,
    target_folder,
)
from mlx_mesh.node.delivery.program import Speaker, end_now, on_end_of_stdin, run_program
from mlx_mesh.node.facts import digest_model
from mlx_mesh.node.hub import SMALL_FILES, WEIGHTS, find_complete, parse_hub_id

_NUM_SAMPLES = 256
_SAMPLE_BYTES = 4096
OnRead = Callable[[int, int], None]


def look(order: LookOrder, on_read: OnRead | None = None) -> Holding:
    """Raises MeshError when a folder of ours cannot be judged."""
    target = target_folder(order.asked, order.models)
    problem = ""
    for folder in _candidates(order.asked, order.candidates):
        if read_part(folder) is not None:
            target = folder
            break
        try:
            digest = digest_model(folder)
        except PreflightError as error:
            problem = problem or str(error)
            continue
        return Holding(
            state="whole", folder=str(folder), digest=digest, files=_files_of(folder), target=str(target)
        )
    return _delivered(target, order.verify, problem, on_read)


def _delivered(target: Path, verify: bool, problem: str, on_read: OnRead | None) -> Holding:
    record, num_checked, num_damaged = settle_part(target, verify=verify, on_bytes=on_read)
    free = free_bytes(target)
    if record is None:
        problem = problem or "it is not there"
        return Holding(state="none", target=str(target), free_bytes=free, problem=problem)
    is_usable = record.has_small_files and all((target / name).is_file() for name in record.head.files)
    held = record.spans()
    files = _files_of(target, record.head.samples)
    # Of a small file that is not all there yet nothing can be said.
    files = tuple(
        file for file in files if file.is_weights or covers(held.get(file.name, ()), [(0, file.size)])
    )
    return Holding(
        state="whole" if record.is_whole else "part" if is_usable else "none",
        folder=str(target),
        digest=record.head.digest,
        files=files,
        held=held,
        target=str(target),
        free_bytes=free,
        num_damaged=num_damaged,
        num_checked=num_checked,
        problem="" if is_usable else problem or "its delivery was interrupted",
        is_delivered=True,
    )


def _folders(candidates: Sequence[str]) -> Iterator[Path]:
    """Those that are there."""
    for candidate in candidates:
        folder = Path(candidate).expanduser()
        if folder.is_dir():
            yield folder.resolve()


def _candidates(asked: str, candidates: Sequence[str]) -> Iterator[Path]:
    """The same, and what the hub's cache has as a whole."""
    yield from _folders(candidates)
    hub_id = parse_hub_id(asked)
    if hub_id is not None and (found := find_complete(*hub_id)) is not None:
        yield found


def pick_folder(asked: str, candidates: Sequence[str], models: str) -> str:
    """What is to be used for a model: a complete folder, or the hub id itself when the hub's cache has it,
    else what was delivered, else the first that is there; '' when there is none. Reads no weights."""
    there = list(_folders(candidates))
    for folder in there:
        try:
            digest_model(folder)
        except MeshError:
            continue
        return str(folder)
    hub_id = parse_hub_id(asked)
    if hub_id is not None and find_complete(*hub_id) is not None:
        return asked
    target = target_folder(asked, models)
    record = read_part(target)
    if record is not None and record.is_settled and record.has_small_files:
        return str(target)
    return str(there[0]) if there else ""


def _files_of(folder: Path, samples: Mapping[str, str] | None = None) -> tuple[ModelFile, ...]:
    """What belongs to the model: weights, and small files with their digests. `samples`: what the journal has
    of weights that have holes here."""
    found = []
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.startswith(".") or not path.is_file():
            continue
        if WEIGHTS.fullmatch(name):
            size = path.stat().st_size
            sample = sample_of(path, size) if samples is None else samples.get(name, "")
            found.append(ModelFile(name=name, size=size, sample=sample))
        elif SMALL_FILES.fullmatch(name):
            data = path.read_bytes()
            found.append(ModelFile(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest()))
    return tuple(found)


def sample_of(path: Path, size: int) -> str:
    """Hex SHA-256 of blocks spread over a file, the first and the last bytes among them; of a short one all
    of it. Raises OSError."""
    digest = hashlib.sha256()
    num = _NUM_SAMPLES if size > _NUM_SAMPLES * _SAMPLE_BYTES else -(-size // _SAMPLE_BYTES)
    with path.open("rb", buffering=0) as file:
        for index in range(num):
            start = index * max(0, size - _SAMPLE_BYTES) // max(1, num - 1)
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, start))
    return digest.hexdigest()


def _work(order: LookOrder, speaker: Speaker) -> None:
    on_end_of_stdin(end_now)
    holding = look(order, lambda done, total: speaker.say(Reading(done=done, total=total)))
    speaker.say(Looked(holding=holding))


if __name__ == "__main__":
    sys.exit(run_program(LookOrder, _work))
