"""How caches keep keys and values, and what that does to a model's sizes. Pure.

Quantised, each group of neighbouring numbers of a head becomes whole numbers of a few bits with a scale and
a bias of its own, as mlx-lm's QuantizedKVCache keeps them. Only full-attention layers are: what a sliding
window keeps is small, and states of other kinds have no heads.
"""

from __future__ import annotations

import msgspec

from mlx_mesh.mesh.errors import PlacementError, SettingsError
from mlx_mesh.mesh.footprint import LayerFootprint, ModelFootprint
from mlx_mesh.mesh.tensor_units import DividedBytes

KV_BITS = (2, 3, 4, 5, 6, 8)
KV_GROUP_SIZES = (32, 64, 128)
"""What MLX can quantise by."""


class KvOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`bits` 0: keys and values stay as the model computes them."""

    bits: int = 0
    group_size: int = 64

    def bytes_of(self, num_bytes: int, itemsize: int) -> int:
        """Of numbers of `itemsize` bytes that take `num_bytes` as they are: whole groups, each with a scale
        and a bias of the model's own type."""
        numbers = num_bytes // itemsize
        return -(-numbers * self.bits // 8) + -(-numbers // self.group_size) * 2 * itemsize


def check_kv_options(bits: int | None, group_size: int | None, start: int | None) -> KvOptions:
    """Of the flags; None = not given. Raises SettingsError."""
    if bits is None:
        for flag, given in (("--kv-group-size", group_size), ("--quantized-kv-start", start)):
            if given is not None:
                raise SettingsError(f"{flag} {given} says nothing without --kv-bits. Add it, or leave both.")
        return KvOptions()
    if bits not in KV_BITS:
        raise SettingsError(f"--kv-bits {bits} is not possible; use one of {_listed(KV_BITS)}.")
    if group_size is not None and group_size not in KV_GROUP_SIZES:
        raise SettingsError(
            f"--kv-group-size {group_size} is not possible; use one of {_listed(KV_GROUP_SIZES)}."
        )
    if start:
        raise SettingsError(
            f"--quantized-kv-start {start} is not possible: a batch keeps the keys and values of all its "
            "sequences in one form, so those before the start cannot be kept in another. Leave it out: they "
            "are quantised from the first token, which gives a sequence the same tokens whatever runs beside "
            "it."
        )
    return KvOptions(bits=bits, group_size=64 if group_size is None else group_size)


def with_kv_options(footprint: ModelFootprint, options: KvOptions) -> ModelFootprint:
    """The sizes of a model whose caches are kept so. Raises PlacementError when it cannot be."""
    if not options.bits:
        return footprint
    groups = [layer.kv_group_size for layer in footprint.layers if layer.kv_group_size]
    reason = footprint.kv_refusal
    if not reason and not groups:
        reason = "no layer keeps the keys and values of all tokens in a plain cache"
    if not reason and min(groups) < options.group_size:
        reason = (
            f"its heads divide into groups of {min(groups)} numbers, not of {options.group_size} "
            f"(--kv-group-size {min(groups)} does)"
        )
    if reason:
        raise PlacementError(
            f"The keys and values of this {footprint.model_type} model cannot be quantised (--kv-bits "
            f"{options.bits}): {reason}. Leave --kv-bits out."
        )
    tensor = msgspec.structs.replace(
        footprint.tensor, kv_divided=tuple(_divided(part, options) for part in footprint.tensor.kv_divided)
    )
    layers = tuple(_layer(layer, options) for layer in footprint.layers)
    return msgspec.structs.replace(footprint, layers=layers, tensor=tensor)


def _layer(layer: LayerFootprint, options: KvOptions) -> LayerFootprint:
    if not layer.kv_group_size:
        return layer
    return msgspec.structs.replace(
        layer,
        kv_bytes_per_token=options.bytes_of(layer.kv_bytes_per_token, layer.kv_itemsize),
        whole_kv_bytes_per_token=options.bytes_of(layer.whole_kv_bytes_per_token, layer.kv_itemsize),
    )


def _divided(part: DividedBytes, options: KvOptions) -> DividedBytes:
    if not part.kv_itemsize:
        return part
    size = options.bytes_of(part.bytes_per_element, part.kv_itemsize)
    return msgspec.structs.replace(part, bytes_per_element=size)


def _listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
