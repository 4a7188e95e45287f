"""Writes GGUF version 3: for tests and for the quantiser.

Bytes go to a temporary file beside the target, which is renamed over it at the end: a reader sees
the old file or the new one, never a half. What is written passes `gguf.read_gguf`.
Source: the GGUF specification in ggml's docs/gguf.md.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError
from headrace.formats import gguf_types as g
from headrace.formats.blocks import block_kind, num_bytes
from headrace.types import StoredTensor

_TYPE_OF_DTYPE = {
    dtype: kind for kind, dtype in g.SCALAR_DTYPES.items() if kind != g.ValueType.BOOL
}


def write_gguf(
    path: str | Path, metadata: Mapping[str, Any], tensors: Iterable[StoredTensor]
) -> None:
    """Write a file atomically; keys and tensors keep their order.

    Values: bool; int (U32 if it fits, else I32, I64, U64); float (F32, as every GGUF reader
    expects of numbers); str; numpy scalars and one-dimensional arrays (their own type); lists of
    str, of bool, of int (I32 or I64) or of float (F32); an empty list is an array of strings.

    **Raises** `FormatError` for what the format cannot hold.
    """
    path, tensors = Path(path), list(tensors)
    alignment = int(metadata.get("general.alignment", g.DEFAULT_ALIGNMENT))
    header = _header(metadata, tensors, alignment)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            _write(out, header, tensors, alignment)
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _write(out: BinaryIO, header: bytes, tensors: Sequence[StoredTensor], alignment: int) -> None:
    out.write(header)
    for tensor in tensors:
        out.write(_padding(out.tell(), alignment))
        out.write(np.ascontiguousarray(tensor.data).data)
    out.write(_padding(out.tell(), alignment))


def _padding(position: int, alignment: int) -> bytes:
    return bytes(-position % alignment)


def _header(metadata: Mapping[str, Any], tensors: Sequence[StoredTensor], alignment: int) -> bytes:
    if not g.MIN_ALIGNMENT <= alignment <= g.MAX_ALIGNMENT or alignment & (alignment - 1):
        raise FormatError(
            f"general.alignment is {alignment}; it must be a power of two from "
            f"{g.MIN_ALIGNMENT} to {g.MAX_ALIGNMENT}"
        )
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise FormatError("two tensors have the same name")
    parts = [g.MAGIC, struct.pack("<Iqq", g.VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise FormatError(f"metadata key {key!r} is not printable ASCII without spaces")
        parts += [_string(key), _value(key, value)]
    offset = 0
    for tensor in tensors:
        parts.append(_info(tensor, offset))
        offset += tensor.data.size + -tensor.data.size % alignment
    return b"".join(parts)


def _info(tensor: StoredTensor, offset: int) -> bytes:
    name = tensor.name.encode()
    if not 1 <= len(name) <= g.MAX_NAME_BYTES or not tensor.name.isprintable():
        raise FormatError(f"tensor name {tensor.name!r} must have 1 to {g.MAX_NAME_BYTES} bytes")
    if not 1 <= len(tensor.shape) <= g.MAX_DIMS or min(tensor.shape) < 1:
        raise FormatError(f"tensor {tensor.name!r}: GGUF cannot hold the shape {tensor.shape}")
    expected = num_bytes(tensor.kind, tensor.shape)
    if tensor.data.dtype != np.uint8 or tensor.data.size != expected:
        raise FormatError(
            f"tensor {tensor.name!r} of shape {tensor.shape} and kind {tensor.kind} has "
            f"{expected} bytes, got {tensor.data.size} of type {tensor.data.dtype}"
        )
    dims = tuple(reversed(tensor.shape))
    layout = f"<I{len(dims)}qIQ"
    type_id = block_kind(tensor.kind).type_id
    return _string(tensor.name) + struct.pack(layout, len(dims), *dims, type_id, offset)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(key: str, value: Any) -> bytes:
    """Type and bytes of one value."""
    if isinstance(value, np.ndarray):
        if value.ndim != 1:
            raise FormatError(f"metadata {key!r}: an array must have one dimension")
        kind, data = _numbers(key, value)
        return struct.pack("<IIQ", g.ValueType.ARRAY, kind, len(value)) + data
    if isinstance(value, np.generic):
        kind, data = _numbers(key, np.asarray(value))
        return struct.pack("<I", kind) + data
    if isinstance(value, list | tuple):
        return _list(key, value)
    if isinstance(value, str):
        return struct.pack("<I", g.ValueType.STRING) + _string(value)
    if isinstance(value, bool | int | float):
        return _value(key, _as_numpy(key, value))
    raise FormatError(f"metadata {key!r}: GGUF cannot hold a {type(value).__name__}")


def _list(key: str, values: Sequence[Any]) -> bytes:
    if all(isinstance(item, str) for item in values):
        parts = [struct.pack("<IIQ", g.ValueType.ARRAY, g.ValueType.STRING, len(values))]
        return b"".join(parts + [_string(item) for item in values])
    kinds = {type(item) for item in values}
    if kinds == {bool}:
        return _value(key, np.array(values, np.bool_))
    if kinds == {int}:
        is_small = all(-(2**31) <= item < 2**31 for item in values)
        return _value(key, np.array(values, np.int32 if is_small else np.int64))
    if kinds <= {int, float}:
        return _value(key, _float32(key, values))
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    raise FormatError(f"metadata {key!r}: GGUF cannot hold a list of {names}")


def _as_numpy(key: str, value: bool | int | float) -> np.generic:
    if isinstance(value, bool):
        return np.bool_(value)
    if isinstance(value, float):
        return np.float32(_float32(key, [value])[0])
    for kind in (np.uint32, np.int32, np.int64, np.uint64):
        if np.iinfo(kind).min <= value <= np.iinfo(kind).max:
            return kind(value)
    raise FormatError(f"metadata {key!r}: {value} does not fit into 64 bits")


def _float32(key: str, values: Sequence[float]) -> NDArray[np.float32]:
    wide = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    if (np.isinf(narrow) & ~np.isinf(wide)).any():
        raise FormatError(f"metadata {key!r}: a number does not fit into an F32")
    return narrow


def _numbers(key: str, array: np.ndarray[Any, Any]) -> tuple[int, bytes]:
    if array.dtype == np.bool_:
        return g.ValueType.BOOL, array.tobytes()
    little = array.dtype.newbyteorder("<")
    if little not in _TYPE_OF_DTYPE:
        raise FormatError(f"metadata {key!r}: GGUF cannot hold numbers of type {array.dtype}")
    return _TYPE_OF_DTYPE[little], array.astype(little).tobytes()
