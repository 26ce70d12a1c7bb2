"""A prompt's features as bytes, from the leader to the other ranks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from mlx_mesh.node.engine.features import Features

_BY_NAME = {
    str(dtype).rpartition(".")[2]: dtype
    for dtype in (mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.int64, mx.uint32, mx.bool_, mx.uint8)
}


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class _Wire(msgspec.Struct, frozen=True, array_like=True):
    length: int
    delta: int
    fields: dict[str, list[_Array]]
    lists: tuple[str, ...]  # fields that are a list of arrays
    is_whole: bool
    sees_ahead: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Wire)


def encode_features(features: Features) -> bytes:
    """Evaluates what is not evaluated yet."""
    fields = {
        name: [_pack(x) for x in (value if isinstance(value, (list, tuple)) else [value])]
        for name, value in features.fields.items()
    }
    lists = tuple(name for name, value in features.fields.items() if isinstance(value, (list, tuple)))
    return _encoder.encode(
        _Wire(features.length, features.delta, fields, lists, features.is_whole, features.sees_ahead)
    )


def decode_features(data: bytes) -> Features:
    """The same arrays, bit for bit. Raises msgspec.MsgspecError or ValueError for anything else."""
    wire = _decoder.decode(data)
    fields: dict[str, Any] = {}
    for name, arrays in wire.fields.items():
        unpacked = [_unpack(array) for array in arrays]
        fields[name] = unpacked if name in wire.lists else unpacked[0]
    return Features(wire.length, fields, wire.delta, is_whole=wire.is_whole, sees_ahead=wire.sees_ahead)


def _pack(array: Any) -> _Array:
    name = str(array.dtype).rpartition(".")[2]
    if name not in _BY_NAME:
        raise ValueError(f"features of type {array.dtype} cannot be sent")
    plain = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    return _Array(name, tuple(array.shape), np.array(plain).tobytes())


def _unpack(array: _Array) -> Any:
    dtype = _BY_NAME[array.dtype]
    if dtype == mx.bfloat16:
        numbers = np.frombuffer(array.data, dtype=np.uint16).reshape(array.shape)
        return mx.array(numbers).view(mx.bfloat16)
    numbers = np.frombuffer(array.data, dtype=np.dtype(_NUMPY.get(array.dtype, array.dtype)))
    return mx.array(numbers.reshape(array.shape))


_NUMPY = {"bool": "bool", "bool_": "bool"}
