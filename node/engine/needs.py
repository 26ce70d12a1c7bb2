"""`python -m mlx_mesh.node.engine.needs MODEL`: which bytes of the weight files each rank of a placement
reads. Placement as one line of JSON on stdin; a list of {file: [[start, end], ...]} by rank, the last line on
stdout.

It is found out by loading: the same code that loads a share runs, but notes what it would read. So what is
delivered to a host is what its engine will ask for.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mlx_mesh.mesh.delivery import gigabytes, missing_spans, size_of
from mlx_mesh.mesh.errors import ExitCode, MeshError, PreflightError
from mlx_mesh.mesh.spans import Span
from mlx_mesh.mesh.types import Placement, VisionMode
from mlx_mesh.node.delivery.part_folder import read_part
from mlx_mesh.node.facts import resolve_model


def needs_of(
    folder: Path, placement: Placement, rank: int, adapter: str = "", *, with_vision: bool = False
) -> dict[str, list[Span]]:
    """What rank `rank` reads: file name -> spans. A vision model is read by mlx-vlm's own loader, which does
    not tell what it makes of which tensor: it is needed as a whole. Raises MeshError for a model or placement
    that is none."""
    if with_vision:
        return {file.name: [(0, file.stat().st_size)] for file in folder.glob("model*.safetensors")}
    from mlx_mesh.node.engine.loader import open_lazy
    from mlx_mesh.node.engine.reading import Noting
    from mlx_mesh.node.engine.shard import load_opened

    lazy = open_lazy(folder, adapter, keep_given=True)
    noting = Noting(lazy)
    load_opened(lazy, placement, rank, _Nobody(rank, placement.world_size), noting)
    return noting.spans()


class _Nobody:
    """The Exchange of a rank that only loads."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def send(self, x: Any, to: int) -> Any:
        raise AssertionError("nothing is computed here")

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int) -> Any:
        raise AssertionError("nothing is computed here")

    def all_sum(self, x: Any) -> Any:
        raise AssertionError("nothing is computed here")

    def all_gather(self, x: Any) -> Any:
        raise AssertionError("nothing is computed here")

    def broadcast_ids(self, ids: Any | None, num_rows: int, after: list[Any]) -> Any:
        raise AssertionError("nothing is computed here")


def check_present(
    folder: Path, placement: Placement, rank: int, adapter: str = "", *, with_vision: bool = False
) -> None:
    """A folder that has a part of its model must have what this rank reads: the rest of its files are holes,
    which read as zeros. Raises PreflightError."""
    record = read_part(folder)
    if record is None or record.is_whole:
        return
    held = record.spans() if record.is_settled else {}
    missing = missing_spans(needs_of(folder, placement, rank, adapter, with_vision=with_vision), held)
    if missing:
        here = placement.shards[rank]
        raise PreflightError(
            f"{here.host}: rank {rank} (layers {here.start_layer} to {here.end_layer - 1}) needs "
            f"{gigabytes(size_of(missing))} of {', '.join(sorted(missing)[:3])} that {folder} does not have: "
            "it was delivered for another plan. Bring it with `mlx-mesh sync` or `mlx-mesh up`, or all "
            "of the model with `mlx-mesh sync --full`."
        )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m mlx_mesh.node.engine.needs")
    parser.add_argument("model")
    parser.add_argument("--adapter-path", default="")
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--vision", type=VisionMode, default=VisionMode.AUTO)
    arguments = parser.parse_args(list(argv))
    if arguments.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    from mlx_mesh.node.vision import choose_vision

    try:
        placement = msgspec.json.decode(sys.stdin.buffer.readline(), type=Placement)
        folder = resolve_model(arguments.model)
        adapter = arguments.adapter_path
        with_vision, _ = choose_vision(folder, arguments.vision, has_adapter=bool(adapter))
        found = [
            needs_of(folder, placement, rank, adapter, with_vision=with_vision)
            for rank in range(placement.world_size)
        ]
    except MeshError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except msgspec.MsgspecError as error:
        print(f"the placement on stdin cannot be read: {error}", file=sys.stderr)
        return ExitCode.USAGE
    print(msgspec.json.encode(found).decode(), flush=True)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
