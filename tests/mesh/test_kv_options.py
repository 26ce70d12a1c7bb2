"""What quantised caches cost, and which models and flags are refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.errors import PlacementError, SettingsError
from mlx_mesh.mesh.footprint import LayerFootprint, ModelFootprint, TensorFootprint
from mlx_mesh.mesh.kv_options import KvOptions, check_kv_options, with_kv_options
from mlx_mesh.mesh.tensor_units import DividedBytes, Division, Segment

HEAD_BYTES = 2 * 64 * 2  # a key and a value of 64 half-precision numbers
FULL = LayerFootprint(weights_bytes=1, kv_bytes_per_token=4 * HEAD_BYTES, kv_group_size=64, kv_itemsize=2)
SLIDING = LayerFootprint(weights_bytes=1, kv_bytes_per_token=4 * HEAD_BYTES, kv_window=512)
HEADS = (Segment(4, 1),)


def footprint(*layers: LayerFootprint, refusal: str = "") -> ModelFootprint:
    division = Division((0, 1, 2, 3, 4))
    return ModelFootprint(
        model_type="test",
        model_digest="d",
        num_layers=len(layers),
        layers=layers,
        embedding_bytes=1,
        head_bytes=1,
        tied_embedding=False,
        legal_cuts=(),
        cut_reason="",
        hidden_bytes_per_token=64,
        context_length=8192,
        vocab_size=100,
        kv_refusal=refusal,
        tensor=TensorFootprint(
            attention_units=4,
            attention_bytes=1,
            mlp_units=4,
            mlp_bytes=1,
            replicated_bytes=1,
            kv_divided=(
                DividedBytes(division, HEADS, HEAD_BYTES, kv_itemsize=2),
                DividedBytes(division, HEADS, HEAD_BYTES),
            ),
        ),
    )


@pytest.mark.parametrize(("bits", "group_size", "per_head"), [(8, 64, 136), (4, 32, 80), (3, 64, 56)])
def test_numbers_scales_and_biases_are_counted(bits: int, group_size: int, per_head: int) -> None:
    """128 numbers of a head: bits / 8 each, and 4 bytes for each group."""
    quantised = with_kv_options(footprint(FULL, SLIDING), KvOptions(bits=bits, group_size=group_size))
    assert [layer.kv_bytes_per_token for layer in quantised.layers] == [4 * per_head, 4 * HEAD_BYTES]
    assert [part.bytes_per_element for part in quantised.tensor.kv_divided] == [per_head, HEAD_BYTES]


def test_without_bits_nothing_changes() -> None:
    plain = footprint(FULL, refusal="some reason")
    assert with_kv_options(plain, KvOptions()) is plain


@pytest.mark.parametrize(
    ("model", "group_size", "told"),
    [
        (footprint(SLIDING), 64, "no layer keeps the keys and values of all tokens"),
        (footprint(FULL, refusal="its attention is odd"), 64, "its attention is odd"),
        (footprint(FULL), 128, "groups of 64 numbers, not of 128 (--kv-group-size 64 does)"),
        (footprint(FULL, msgspec.structs.replace(FULL, kv_group_size=32)), 64, "--kv-group-size 32 does"),
    ],
)
def test_a_model_that_cannot_is_refused_with_the_reason(
    model: ModelFootprint, group_size: int, told: str
) -> None:
    with pytest.raises(PlacementError, match="cannot be quantised") as error:
        with_kv_options(model, KvOptions(bits=8, group_size=group_size))
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((7, None, None), "--kv-bits 7 is not possible; use one of 2, 3, 4, 5, 6 and 8"),
        ((0, None, None), "--kv-bits 0"),
        ((8, 16, None), "--kv-group-size 16 is not possible; use one of 32, 64 and 128"),
        ((8, None, 5000), "--quantized-kv-start 5000 is not possible: a batch keeps"),
        ((None, 64, None), "--kv-group-size 64 says nothing without --kv-bits"),
        ((None, None, 0), "--quantized-kv-start 0 says nothing without --kv-bits"),
    ],
)
def test_flags_that_cannot_be_are_refused_with_what_can(flags: Any, told: str) -> None:
    with pytest.raises(SettingsError) as error:
        check_kv_options(*flags)
    assert told in str(error.value)


def test_flags_that_can_be() -> None:
    assert check_kv_options(None, None, None) == KvOptions()
    assert check_kv_options(8, None, 0) == KvOptions(bits=8, group_size=64)
    assert check_kv_options(4, 32, None) == KvOptions(bits=4, group_size=32)
