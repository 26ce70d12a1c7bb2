"""Prints the footprint of a model with four layers, or fails when the folder holds a file named `broken`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from mlx_mesh.mesh.footprint import LayerFootprint, ModelFootprint, TensorFootprint

if (Path(sys.argv[1]) / "broken").exists():
    sys.exit("this model has no layers")
layer = LayerFootprint(weights_bytes=1000, kv_bytes_per_token=8)
print("a line of chatter")
print(
    msgspec.json.encode(
        ModelFootprint(
            model_type="fake",
            model_digest="d",
            num_layers=4,
            layers=(layer,) * 4,
            embedding_bytes=100,
            head_bytes=100,
            tied_embedding=False,
            legal_cuts=(1, 2, 3),
            cut_reason="",
            hidden_bytes_per_token=16,
            context_length=1024,
            vocab_size=1000,
            tensor=TensorFootprint(
                attention_units=2,
                attention_bytes=1000,
                mlp_units=2,
                mlp_bytes=1000,
                replicated_bytes=100,
            ),
        )
    ).decode()
)
