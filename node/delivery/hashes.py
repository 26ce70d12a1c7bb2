"""`python -m mlx_mesh.node.delivery.hashes`: read pieces of a folder, and say the SHA-256 of each. HashOrder
in, Hashes out."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlx_mesh.mesh.delivery_orders import Hashes, HashOrder, Reading
from mlx_mesh.node.delivery.part_folder import check_source, hash_piece
from mlx_mesh.node.delivery.program import Speaker, end_now, on_end_of_stdin, run_program

_NUM_THREADS = 4
_NUM_PER_LINE = 32  # pieces between two signs of life


def _work(order: HashOrder, speaker: Speaker) -> None:
    on_end_of_stdin(end_now)
    folder = Path(order.folder)
    check_source(folder, {piece.file for piece in order.pieces})
    total = sum(piece.size for piece in order.pieces)
    found: list[str] = []
    done = 0
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for index, sha256 in enumerate(pool.map(lambda piece: hash_piece(folder, piece), order.pieces)):
            found.append(sha256)
            done += order.pieces[index].size
            if index % _NUM_PER_LINE == 0:
                speaker.say(Reading(done=done, total=total))
    speaker.say(Hashes(sha256=tuple(found)))


if __name__ == "__main__":
    sys.exit(run_program(HashOrder, _work))
