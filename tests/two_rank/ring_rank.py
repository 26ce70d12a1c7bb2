"""One rank of a real ring that runs a list of tiny models: `ring_rank.py RANK PORT,PORT,...`.

Every model runs whole on rank 0 and is divided for all ranks, which then say "ready" and wait for a line on
stdin; then the ranks run them together. Rank 0 prints one JSON line for each plan.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

from mlx_mesh.mesh.messages import Connect
from mlx_mesh.mesh.types import Backend
from mlx_mesh.node.engine.group import form_group
from mlx_mesh.node.engine.shard import check_cuts, shard_model
from mlx_mesh.node.engine.trace import ModelTrace, trace_model

KINDS = (
    "deepseek_v3",  # latent attention, experts
    "falcon_h1",  # attention and Mamba 2 side by side
    "gemma3_text",  # sliding window, one KV head
    "gemma3n",  # shared KV caches, per-layer inputs
    "gpt_oss",  # sinks, biases, experts
    "hunyuan",  # keys and values handed from layer to layer
    "kimi_k3",  # KDA, residual blocks
    "mamba",
    "nemotron_h",
    "olmo2",  # norms over the whole projection
    "qwen3_moe",
    "qwen3_next",  # gated delta net, gated attention
    "rwkv7",
)


def load_tiny() -> Any:
    path = Path(__file__).parent.parent / "node" / "engine" / "tiny.py"
    spec = importlib.util.spec_from_file_location("tiny", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plans(tiny: Any, trace: ModelTrace, world_size: int) -> dict[str, Any]:
    num_layers = trace.num_layers
    legal = [cut for cut in range(1, num_layers) if not trace.why_not(cut)]
    weights = [2, 1] if world_size == 2 else [1, 1, 1]
    cuts = legal[:1] if world_size == 2 else [legal[0], legal[-1]]
    return {"pipeline": tiny.stages(num_layers, cuts), "tensor": tiny.slices(num_layers, weights)}


def main(rank: int, ports: list[str]) -> None:
    tiny = load_tiny()
    connect = Connect(
        epoch=1,
        rank=rank,
        world_size=len(ports),
        backend=Backend.RING,
        addresses=tuple((f"127.0.0.1:{port}",) for port in ports),
        deadline_s=60.0,
    )
    group = form_group(connect, lambda message: sys.exit(message))
    tries = []
    for kind in KINDS:
        config = tiny.CONFIGS[kind]
        reference = tiny.forward(tiny.build(config).model, 1) if rank == 0 else []
        trace = trace_model(tiny.build(config).model)
        for name, placement in plans(tiny, trace, len(ports)).items():
            lazy = tiny.build(config)
            shard = shard_model(lazy, placement, rank, group.exchange, tiny.ignore_progress, trace=trace)
            tries.append((kind, name, shard, reference))
    # A rank that waits in a collective takes a core from those that are still loading.
    print("ready", flush=True)
    sys.stdin.readline()
    for kind, name, shard, reference in tries:
        started = time.monotonic()
        check_cuts(shard, group.exchange)
        outputs = tiny.forward(shard.model, 1)
        group.exchange.settle()
        if rank == 0:
            gap, seconds = tiny.gap(outputs, reference), time.monotonic() - started
            print(json.dumps({"kind": kind, "plan": name, "gap": gap, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","))
