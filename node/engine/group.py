"""From a Connect command to a data group that has proved itself, or an error that says what is wrong.

`mx.distributed.init` waits for its peers without limit, without a handshake and with the GIL held: no thread
of this process runs meanwhile. The agent's deadline ends it; a watchdog in C is the last resort.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_mesh.mesh.messages import Connect, NeighbourLink
from mlx_mesh.mesh.types import Backend
from mlx_mesh.node.engine.binding import check_bindable
from mlx_mesh.node.engine.exchanges import CollectiveExchange, DataExchange, RingExchange, SoloExchange
from mlx_mesh.node.engine.failure import EngineError
from mlx_mesh.node.engine.neighbours import hung_up, ring_links
from mlx_mesh.node.engine.ring_probe import probe_ring

CHECK_S = 10.0
"""The checked collective takes milliseconds; after this a stranger sits at the other end of a connection."""

INIT_GRACE_S = 5.0
"""How long after Connect.deadline_s an init that still waits ends the process, if nobody has by then."""

_MLX_NAMES = {
    Backend.RING: "ring",
    Backend.JACCL: "jaccl",
    Backend.JACCL_RING: "jaccl",
    Backend.NCCL: "nccl",
}


@dataclass(frozen=True, slots=True)
class DataGroup:
    """The ranks of one epoch, connected and checked."""

    rank: int
    world_size: int
    backend: Backend
    exchange: DataExchange
    has_neighbour_sends: bool  # False: a transfer takes part of all ranks, so at most two of them
    measured: NeighbourLink | None = None  # of a ring: what was found towards the next rank
    links: dict[int, int] = field(default_factory=dict)  # the ring's, see neighbours.ring_links

    def hung_up(self) -> tuple[int, ...]:
        """After a collective failed: the ranks that closed their connection, as far as it can be seen."""
        if self.world_size == 2:
            return (1 - self.rank,)
        return hung_up(self.links)


def form_group(connect: Connect, on_stuck: Callable[[str], None]) -> DataGroup:
    """Join the data group. Raises EngineError (config, bind, peer_lost, stray_peer).

    `on_stuck(message)` is called from another thread when the checked collective does not end: nothing can
    interrupt it, so it has to report and end the process.
    """
    if connect.world_size == 1:
        return DataGroup(0, 1, Backend.NONE, SoloExchange(), has_neighbour_sends=False)
    name = _MLX_NAMES.get(connect.backend)
    if name is None or not mx.distributed.is_available(name):
        raise EngineError(
            "config",
            f"This MLX build cannot use the backend {connect.backend.value!r} on this host. "
            "Set `backend: ring`, which every build has.",
        )
    measured = None
    if name == "ring":
        for address in connect.addresses[connect.rank]:
            check_bindable(address)
        measured = probe_ring(connect)
    with group_environment(connect), _watchdog(connect.deadline_s + INIT_GRACE_S):
        try:
            group = mx.distributed.init(strict=True, backend=name)
        except RuntimeError as error:
            raise _init_error(connect, error) from error
    check_identity(connect, group.rank(), group.size())
    _check_collectives(connect, group, on_stuck)
    exchange = RingExchange(group) if name == "ring" else CollectiveExchange(group)
    return DataGroup(
        connect.rank,
        connect.world_size,
        connect.backend,
        exchange,
        has_neighbour_sends=name == "ring",
        links=ring_links(connect.addresses, connect.rank) if name == "ring" else {},
        measured=measured,
    )


# ---------------------------------------------------------------- before init


def environment_for(connect: Connect, file_of: Callable[[Any], str]) -> dict[str, str]:
    """The variables by which MLX's backends find each other. `file_of` gives a path that yields its argument
    as JSON."""
    variables = {"MLX_RANK": str(connect.rank)}
    match connect.backend:
        case Backend.RING:
            variables["MLX_HOSTFILE"] = file_of([list(a) for a in connect.addresses])
        case Backend.JACCL | Backend.JACCL_RING:
            variables["MLX_IBV_DEVICES"] = file_of([list(row) for row in connect.rdma])
            variables["MLX_JACCL_COORDINATOR"] = connect.coordinator
            if connect.backend is Backend.JACCL_RING:
                variables["MLX_JACCL_RING"] = "1"
        case Backend.NCCL:
            host, _, port = connect.coordinator.rpartition(":")
            variables |= {
                "NCCL_HOST_IP": host,
                "NCCL_PORT": port,
                "MLX_WORLD_SIZE": str(connect.world_size),
            }
        case _:
            raise AssertionError(f"no environment for {connect.backend}")
    return variables


@contextmanager
def group_environment(connect: Connect) -> Iterator[None]:
    """MLX reads its settings from the environment and from files; both exist only inside this block.
    The files are pipes, so nothing is left on disk."""
    read_ends: list[int] = []

    def file_of(value: Any) -> str:
        read_end, write_end = os.pipe()
        read_ends.append(read_end)
        with os.fdopen(write_end, "wb") as file:
            file.write(json.dumps(value).encode())  # far below a pipe's 64 KiB for any mesh
        return f"/dev/fd/{read_end}"

    variables = environment_for(connect, file_of)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        for fd in read_ends:
            os.close(fd)


@contextmanager
def _watchdog(seconds: float) -> Iterator[None]:
    """End the process with a traceback if the block takes longer; works while the GIL is held."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _init_error(connect: Connect, error: RuntimeError) -> EngineError:
    text = str(error)
    own = ", ".join(connect.addresses[connect.rank]) if connect.addresses else connect.coordinator
    if "bind" in text.lower() or "listen" in text.lower():
        return EngineError("bind", f"Rank {connect.rank} cannot listen on {own}: {text}")
    peer = (connect.rank + 1) % connect.world_size
    where = ", ".join(connect.addresses[peer]) if connect.addresses else connect.coordinator
    return EngineError(
        "peer_lost",
        f"Rank {connect.rank} ({own}) cannot reach rank {peer} at {where}: {text}. "
        "Check that the hosts reach each other on these addresses and that no firewall is between them.",
        (peer,),
    )


# ---------------------------------------------------------------- after init


def check_identity(connect: Connect, rank: int, size: int) -> None:
    """The group must be the one we were told about: `init` falls back and guesses where it can."""
    if (rank, size) != (connect.rank, connect.world_size):
        raise EngineError(
            "config",
            f"MLX says rank {rank} of {size}; this engine is rank {connect.rank} of {connect.world_size}. "
            "The ranks do not agree about the mesh.",
        )


def rank_code(rank: int, epoch: int) -> int:
    """What a rank says of itself in the checked collective; fits in 31 bits."""
    return 1 + rank + 1000 * (1 + epoch % 1_000_000)


def _check_collectives(connect: Connect, group: Any, on_stuck: Callable[[str], None]) -> None:
    """One sum and one gather of values that only the right ranks of this epoch can produce."""
    rank, size = connect.rank, connect.world_size
    expected = [rank_code(r, connect.epoch) for r in range(size)]
    timer = threading.Timer(CHECK_S, on_stuck, [stuck_message(connect)])
    timer.daemon = True
    timer.start()
    try:
        own = mx.array([code if r == rank else 0 for r, code in enumerate(expected)], mx.int32)
        summed = mx.distributed.all_sum(own, group=group)
        mx.eval(summed)
        gathered = mx.distributed.all_gather(mx.array([expected[rank]], mx.int32), group=group)
        mx.eval(gathered)
    except RuntimeError as error:
        raise EngineError(
            "stray_peer", f"{_stranger(connect)} The first collective failed: {error}."
        ) from error
    finally:
        timer.cancel()
    for what, seen in (("sum", summed.tolist()), ("gather", gathered.tolist())):
        check_codes(connect, what, seen, expected)


def check_codes(connect: Connect, what: str, seen: list[int], expected: list[int]) -> None:
    """Raises EngineError(stray_peer) unless every rank's code arrived in its place."""
    wrong = [r for r, (a, b) in enumerate(zip(seen, expected, strict=True)) if a != b]
    if wrong:
        raise EngineError(
            "stray_peer",
            f"{_stranger(connect)} The checked {what} has wrong values for ranks {wrong}: {seen}, "
            f"not {expected}.",
        )


def stuck_message(connect: Connect) -> str:
    """For a checked collective that never ended."""
    return f"{_stranger(connect)} The first collective did not end within {CHECK_S:g} s."


def _stranger(connect: Connect) -> str:
    own = ", ".join(connect.addresses[connect.rank]) if connect.addresses else connect.coordinator
    return f"Someone who is not of this mesh may be connected to rank {connect.rank} ({own})."
