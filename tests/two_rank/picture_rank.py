"""One rank of a real ring of tiny vision models: `picture_rank.py RANK PORT,PORT,... FOLDER FAMILY,...`.
A family may be followed by what its prompt shows, like "qwen2_vl:video"; otherwise it is a picture.

Rank 0 has the towers: it runs each model whole, and writes what the language part needs of the picture to
FOLDER, in the form in which it travels. The other ranks' towers are poisoned. All say "ready" and wait for a
line on stdin; then the ranks run the prompts together. Rank 0 prints one JSON line for each plan.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from mlx_mesh.mesh.messages import Connect
from mlx_mesh.mesh.types import Backend
from mlx_mesh.node.engine.certificate import certify
from mlx_mesh.node.engine.feature_wire import decode_features, encode_features
from mlx_mesh.node.engine.group import form_group
from mlx_mesh.node.engine.language_part import LanguagePart
from mlx_mesh.node.engine.loader import LazyModel
from mlx_mesh.node.engine.shard import check_cuts, shard_model
from mlx_mesh.node.engine.trace import trace_model

NUM_DECODED = 4


def load(name: str) -> Any:
    path = Path(__file__).parent.parent / "node" / "engine" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(rank: int, ports: list[str], folder: Path, families: list[str]) -> None:
    tiny, tiny_vlm = load("tiny"), load("tiny_vlm")
    connect = Connect(
        epoch=1,
        rank=rank,
        world_size=len(ports),
        backend=Backend.RING,
        addresses=tuple((f"127.0.0.1:{port}",) for port in ports),
        deadline_s=120.0,
    )
    group = form_group(connect, lambda message: sys.exit(message))

    def opened(family: str) -> tuple[Any, LazyModel]:
        whole = tiny_vlm.build(family)
        return whole, LazyModel(
            Path(family), LanguagePart(whole.language_model), tiny_vlm.CONFIGS[family], {}
        )

    tries, expected = [], {}
    for name in families:
        family, _, kind = name.partition(":")
        whole, lazy = opened(family)
        trace = trace_model(lazy.model)
        proposal = certify(lazy, trace).proposal
        legal = [cut for cut in range(1, trace.num_layers) if not trace.why_not(cut)]
        if rank == 0:
            prompt = tiny_vlm.SHOWN[kind or "picture"](family)
            logits, tokens = tiny_vlm.reference(whole, family, NUM_DECODED, prompt=prompt)
            ids, features = tiny_vlm.features_in(whole, family, prompt)
            (folder / f"{name}.features").write_bytes(encode_features(features))
            (folder / f"{name}.json").write_text(json.dumps({"ids": ids, "tokens": tokens}))
            expected[name] = logits
        plans = {
            "pipeline": tiny.stages(
                trace.num_layers, [legal[0]] if len(ports) == 2 else [legal[0], legal[-1]]
            ),
            "tensor": tiny.slices(trace.num_layers, [1] * len(ports)),
        }
        if not proposal.for_ranks(len(ports)):
            del plans["tensor"]
        for plan, placement in plans.items():
            own, mine = opened(family)
            if rank:
                tiny_vlm.poison_tower(own)
            units = proposal if plan == "tensor" else None
            shard = shard_model(
                mine,
                placement,
                rank,
                group.exchange,
                tiny.ignore_progress,
                proposal=units,
                trace=trace_model(mine.model),
            )
            tries.append((name, plan, shard))
    print("ready", flush=True)
    sys.stdin.readline()
    for name, plan, shard in tries:
        asked = json.loads((folder / f"{name}.json").read_text())
        features = decode_features((folder / f"{name}.features").read_bytes())
        check_cuts(shard, group.exchange)
        chunks = tiny_vlm.chunks_of(features.length)
        outputs = tiny_vlm.forward(shard.model, asked["ids"], features, chunks, asked["tokens"])
        group.exchange.settle()
        if rank == 0:
            gap = tiny.gap(outputs, expected[name])
            print(json.dumps({"family": name, "plan": plan, "gap": gap}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2].split(","), Path(sys.argv[3]), sys.argv[4].split(","))
