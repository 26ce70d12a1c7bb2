"""Forming the data group: what is said to MLX, and what is said when it goes wrong."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from mlx_mesh.mesh.messages import Connect
from mlx_mesh.mesh.types import Backend
from mlx_mesh.node.engine.binding import check_bindable
from mlx_mesh.node.engine.exchanges import SoloExchange
from mlx_mesh.node.engine.failure import EngineError
from mlx_mesh.node.engine.group import (
    check_codes,
    check_identity,
    environment_for,
    form_group,
    group_environment,
    rank_code,
    stuck_message,
)

RING = Connect(
    epoch=1,
    rank=1,
    world_size=2,
    backend=Backend.RING,
    addresses=(("10.0.0.1:5000",), ("10.0.0.2:5001", "10.0.1.2:5002")),
)


def never(message: str) -> None:
    raise AssertionError(message)


def test_world_size_one_has_no_group_and_everything_is_here() -> None:
    group = form_group(Connect(epoch=1, rank=0, world_size=1, backend=Backend.NONE, addresses=()), never)
    assert isinstance(group.exchange, SoloExchange)
    ids = mx.array([1, 2], mx.uint32)
    assert group.exchange.broadcast_ids(ids, 2, [ids]).tolist() == [1, 2]
    assert group.exchange.all_sum(ids).tolist() == [1, 2]


def test_the_ring_reads_rank_and_hosts_from_the_environment_and_a_pipe() -> None:
    with group_environment(RING):
        assert os.environ["MLX_RANK"] == "1"
        hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        assert hosts == [["10.0.0.1:5000"], ["10.0.0.2:5001", "10.0.1.2:5002"]]
    assert "MLX_RANK" not in os.environ
    assert "MLX_HOSTFILE" not in os.environ


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (Backend.JACCL, {"MLX_IBV_DEVICES": [[None, "rdma_en5"], ["rdma_en4", None]]}),
        (
            Backend.JACCL_RING,
            {"MLX_IBV_DEVICES": [[None, "rdma_en5"], ["rdma_en4", None]], "MLX_JACCL_RING": "1"},
        ),
    ],
)
def test_jaccl_gets_the_device_matrix_and_the_coordinator(backend: Backend, expected: dict[str, Any]) -> None:
    connect = msgspec.structs.replace(
        RING, backend=backend, coordinator="10.0.0.1:7000", rdma=((None, "rdma_en5"), ("rdma_en4", None))
    )
    variables = environment_for(connect, lambda value: value)
    assert variables == {"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "10.0.0.1:7000", **expected}


def test_nccl_gets_host_port_rank_and_size() -> None:
    connect = msgspec.structs.replace(RING, backend=Backend.NCCL, coordinator="10.0.0.1:7000")
    assert environment_for(connect, str) == {
        "MLX_RANK": "1",
        "MLX_WORLD_SIZE": "2",
        "NCCL_HOST_IP": "10.0.0.1",
        "NCCL_PORT": "7000",
    }


def test_a_backend_that_this_build_lacks_is_refused() -> None:
    missing = next(b for b in (Backend.NCCL, Backend.JACCL) if not mx.distributed.is_available(b.value))
    with pytest.raises(EngineError, match="backend: ring") as caught:
        form_group(msgspec.structs.replace(RING, backend=missing), never)
    assert caught.value.kind == "config"


def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(EngineError, match=r"does not have the address 192\.0\.2\.1") as caught:
        check_bindable("192.0.2.1:5000")
    assert caught.value.kind == "bind"


def test_a_taken_port_is_named_even_when_its_owner_shares_it() -> None:
    with socket.socket() as owner:
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        port = owner.getsockname()[1]
        with pytest.raises(EngineError, match=f"Port {port} on 127.0.0.1 is taken") as caught:
            check_bindable(f"127.0.0.1:{port}")
    assert caught.value.kind == "bind"
    check_bindable(f"127.0.0.1:{port}")


def test_a_group_of_another_rank_or_size_is_refused() -> None:
    check_identity(RING, 1, 2)
    for rank, size in ((0, 2), (1, 3), (0, 1)):
        with pytest.raises(EngineError, match=f"rank {rank} of {size}; this engine is rank 1 of 2"):
            check_identity(RING, rank, size)


def test_codes_differ_by_rank_and_epoch_and_fit_an_int32() -> None:
    codes = {rank_code(rank, epoch) for rank in range(8) for epoch in (0, 1, 2, 999_999)}
    assert len(codes) == 32
    assert max(codes) < 2**31


def test_wrong_codes_name_the_ranks_that_are_wrong() -> None:
    expected = [rank_code(r, 1) for r in range(2)]
    check_codes(RING, "sum", expected, expected)
    with pytest.raises(EngineError, match=r"wrong values for ranks \[0\]") as caught:
        check_codes(RING, "sum", [rank_code(0, 2), expected[1]], expected)
    assert caught.value.kind == "stray_peer"


def test_a_stuck_check_suspects_a_stranger_at_this_ranks_address() -> None:
    assert "10.0.0.2:5001" in stuck_message(RING)
