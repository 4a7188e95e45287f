"""GGUF v2 and v3, memory-mapped: every length, count, type and offset is checked before use.

The rules are those of ggml's own reader (`gguf.cpp`), so a file that passes here is one it would
read, plus limits against memory bombs. What a model needs of the metadata is checked in `models`.
The whole container is parsed at once; tensor bytes are only mapped. A file that is truncated by
somebody else while it is being loaded ends the process (SIGBUS); afterwards it is not read.
Writing: `gguf_writer`. Source: the GGUF specification in ggml's docs/gguf.md.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError
from headrace.formats import gguf_types as g
from headrace.formats.blocks import num_bytes
from headrace.formats.gguf_writer import write_gguf
from headrace.formats.mapped import map_file, refuse_mistakes
from headrace.types import Checkpoint, StoredTensor

__all__ = ["GgufFile", "open_gguf", "read_gguf", "shard_paths", "write_gguf"]

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
_MIN_ENTRY_BYTES = 8 + 1 + 4 + 1  # shortest key-value pair: one-letter key, one-byte value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_PROJECTOR = "a vision or audio projector that belongs beside a language model"
_SIDECARS: Mapping[str, str] = {  # values of general.type, or of general.architecture
    "mmproj": _PROJECTOR,
    "clip": _PROJECTOR,
    "adapter": "a LoRA adapter that belongs on top of a base model",
    "imatrix": "an importance matrix for quantising, which holds no weights",
    "controlvector": "a control vector that belongs on top of a model",
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """One parsed file.

    `metadata` values are int, float, bool, str, list[str], or a read-only one-dimensional numpy
    array for an array of numbers or bools. `value_types` keeps the stored type of each key (the
    element type for arrays), which Python values no longer show.
    """

    path: Path
    version: int
    alignment: int
    metadata: Mapping[str, Any]
    value_types: Mapping[str, g.ValueType]
    tensors: Mapping[str, StoredTensor]


def read_gguf(path: str | Path) -> GgufFile:
    """Parse one file, whatever it is for (model, shard, sidecar).

    **Raises** `FormatError` that names the file, the place and the fault.
    """
    path = Path(path)
    data = map_file(path)
    cursor = _Cursor(data, path)
    version = _read_version(cursor)
    num_tensors = cursor.count("tensor count", _MIN_TENSOR_BYTES, g.MAX_TENSORS)
    num_entries = cursor.count("key count", _MIN_ENTRY_BYTES, g.MAX_KEYS)
    metadata, value_types = _read_metadata(cursor, num_entries)
    alignment = _alignment(cursor, metadata, value_types)
    infos = list(_read_infos(cursor, num_tensors))
    tensors = _place(cursor, infos, alignment)
    return GgufFile(path, version, alignment, metadata, value_types, tensors)


def open_gguf(path: str | Path) -> Checkpoint:
    """Open a model file; for any shard of a set, the whole set, with the first one's metadata.

    **Raises** `FormatError` also for sidecar files and incomplete or mixed shard sets.
    """
    path = Path(path)
    paths = shard_paths(path)
    if len(paths) == 1:
        file = read_gguf(path)
        _refuse_lone_shard(file)
        _refuse_sidecar(file)
        return Checkpoint(str(path), "gguf", file.metadata, file.tensors)
    missing = [shard.name for shard in paths if not shard.is_file()]
    if missing:
        raise FormatError(
            f"{path}: {len(missing)} of {len(paths)} shards are missing, the first is "
            f"{missing[0]}; put all shards into one folder"
        )
    files = [read_gguf(shard) for shard in paths]
    _refuse_sidecar(files[0])
    return Checkpoint(str(paths[0]), "gguf", files[0].metadata, _merge(files))


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All files of the set that `path` names itself a part of; `(path,)` for a plain name."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return (path,)
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count:
        raise FormatError(f"{path}: its name says shard {number} of {count}, which cannot be")
    names = (f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))
    return tuple(path.with_name(name) for name in names)


# ---- bounded reads


class _Cursor:
    """A position in the file; every read is held against the bytes left before it is made."""

    def __init__(self, data: NDArray[np.uint8], path: Path) -> None:
        self.data = data
        self.view = data.data
        self.path = path
        self.position = 0
        self.num_strings = 0

    def fail(self, fault: str) -> FormatError:
        return FormatError(f"{self.path}: at byte {self.position}: {fault}")

    def need(self, size: int, what: str) -> None:
        """Refuse unless `size` more bytes are there (and the metadata stays within its limit)."""
        left = len(self.data) - self.position
        if size > left:
            raise self.fail(f"{what} needs {size} bytes but the file has {left} left")
        if self.position + size > g.MAX_METADATA_BYTES:
            raise self.fail(f"{what}: metadata is larger than {g.MAX_METADATA_BYTES} bytes")

    def unpack(self, layout: struct.Struct, what: str) -> Any:
        self.need(layout.size, what)
        values = layout.unpack_from(self.view, self.position)
        self.position += layout.size
        return values[0]

    def u32(self, what: str) -> int:
        return int(self.unpack(_U32, what))

    def u64(self, what: str) -> int:
        return int(self.unpack(_U64, what))

    def count(self, what: str, min_entry_bytes: int, limit: int) -> int:
        """A stored count of entries, none of which can be shorter than `min_entry_bytes`."""
        value = int(self.unpack(_I64, what))
        left = len(self.data) - self.position
        if not 0 <= value <= left // min_entry_bytes:
            raise self.fail(f"{what} {value} is impossible: {left} bytes are left")
        if value > limit:
            raise self.fail(f"{what} {value} is over the limit of {limit}")
        return value

    def string(self, what: str, max_bytes: int = g.MAX_METADATA_BYTES) -> str:
        size = self.u64(f"length of {what}")
        if size > max_bytes:
            raise self.fail(f"{what} is {size} bytes long; the limit is {max_bytes}")
        self.need(size, what)
        try:
            text = str(self.view[self.position : self.position + size], "utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not valid UTF-8 ({error.reason})") from None
        self.position += size
        return text


_U32, _U64, _I64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<q")


# ---- header and metadata


def _read_version(cursor: _Cursor) -> int:
    cursor.need(4, "magic")
    magic = bytes(cursor.view[:4])
    if magic != g.MAGIC:
        refuse_mistakes(cursor.path, cursor.data)
        raise cursor.fail(f"this is not a GGUF file: it starts with {magic!r}, not {g.MAGIC!r}")
    cursor.position = 4
    version = cursor.u32("version")
    if version in g.READABLE_VERSIONS:
        return version
    if version == 1:
        raise cursor.fail("GGUF version 1 is not supported; convert the model again (version 3)")
    if version & 0xFFFF == 0 and version:
        raise cursor.fail(
            f"version {version:#x} shows a big-endian file; only little-endian files are read"
        )
    raise cursor.fail(f"GGUF version {version} is not known; versions 2 and 3 are")


def _read_metadata(
    cursor: _Cursor, num_entries: int
) -> tuple[dict[str, Any], dict[str, g.ValueType]]:
    metadata: dict[str, Any] = {}
    types: dict[str, g.ValueType] = {}
    for _ in range(num_entries):
        key = cursor.string("a metadata key", g.MAX_KEY_BYTES)
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise cursor.fail(f"metadata key {_shown(key)} is not printable ASCII without spaces")
        if key in metadata:
            raise cursor.fail(f"metadata key {_shown(key)} is there twice")
        kind = _value_type(cursor, f"type of {_shown(key)}")
        if kind is g.ValueType.ARRAY:
            types[key], metadata[key] = _read_array(cursor, f"array {_shown(key)}")
        else:
            types[key] = kind
            metadata[key] = _read_scalar(cursor, kind, f"value of {_shown(key)}")
    return metadata, types


def _value_type(cursor: _Cursor, what: str) -> g.ValueType:
    value = cursor.u32(what)
    try:
        return g.ValueType(value)
    except ValueError:
        raise cursor.fail(f"{what} is {value}; value types are 0 to 12") from None


def _read_scalar(cursor: _Cursor, kind: g.ValueType, what: str) -> Any:
    if kind is g.ValueType.STRING:
        return cursor.string(what)
    return _read_numbers(cursor, kind, 1, what)[0].item()


def _read_array(cursor: _Cursor, what: str) -> tuple[g.ValueType, Any]:
    kind = _value_type(cursor, f"element type of {what}")
    if kind is g.ValueType.ARRAY:
        raise cursor.fail(f"{what} holds arrays; nested arrays are not supported")
    count = cursor.u64(f"length of {what}")
    if kind is g.ValueType.STRING:
        return kind, _read_strings(cursor, count, what)
    return kind, _read_numbers(cursor, kind, count, what)


def _read_numbers(cursor: _Cursor, kind: g.ValueType, count: int, what: str) -> NDArray[np.generic]:
    dtype = g.SCALAR_DTYPES[kind]
    cursor.need(count * dtype.itemsize, what)
    raw = cursor.data[cursor.position : cursor.position + count * dtype.itemsize]
    array: NDArray[np.generic] = np.frombuffer(raw.tobytes(), dtype)  # aligned, read-only
    if kind is g.ValueType.BOOL:
        if (raw > 1).any():
            raise cursor.fail(f"{what} is a bool but holds a byte other than 0 and 1")
        array = np.frombuffer(raw.tobytes(), np.bool_)
    cursor.position += count * dtype.itemsize
    return array


def _read_strings(cursor: _Cursor, count: int, what: str) -> list[str]:
    """The hot loop of opening a file (262 thousand strings for Gemma), hence by hand."""
    cursor.need(count * 8, what)
    cursor.num_strings += count
    if cursor.num_strings > g.MAX_STRINGS:
        raise cursor.fail(f"{what}: the file holds more than {g.MAX_STRINGS} strings")
    end_of_file = min(len(cursor.data), g.MAX_METADATA_BYTES)
    view, unpack, position = cursor.view, _U64.unpack_from, cursor.position
    strings: list[str] = []
    append = strings.append
    try:
        for _ in range(count):
            start = position + 8
            position = start + unpack(view, position)[0]
            if position > end_of_file:
                raise cursor.fail(f"element {len(strings)} of {what} reaches past the file's end")
            append(str(view[start:position], "utf-8"))
    except UnicodeDecodeError as error:
        fault = f"element {len(strings)} of {what} is not valid UTF-8 ({error.reason})"
        raise cursor.fail(fault) from None
    except struct.error:
        raise cursor.fail(f"element {len(strings)} of {what} reaches past the end") from None
    cursor.position = position
    return strings


def _alignment(
    cursor: _Cursor, metadata: Mapping[str, Any], types: Mapping[str, g.ValueType]
) -> int:
    value = metadata.get("general.alignment", g.DEFAULT_ALIGNMENT)
    if types.get("general.alignment", g.ValueType.U32) is not g.ValueType.U32:
        raise cursor.fail("general.alignment must be a u32")
    if (
        not isinstance(value, int)
        or not g.MIN_ALIGNMENT <= value <= g.MAX_ALIGNMENT
        or value & (value - 1)
    ):
        raise cursor.fail(
            f"general.alignment is {value}; it must be a power of two from {g.MIN_ALIGNMENT} "
            f"to {g.MAX_ALIGNMENT}"
        )
    return value


# ---- tensors


@dataclass(frozen=True, slots=True)
class _Info:
    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


def _read_infos(cursor: _Cursor, num_tensors: int) -> Iterator[_Info]:
    names: set[str] = set()
    for _ in range(num_tensors):
        name = cursor.string("a tensor name", g.MAX_NAME_BYTES)
        if not name or not name.isprintable():
            raise cursor.fail(f"tensor name {name!r} is empty or not printable")
        if name in names:
            raise cursor.fail(f"tensor {name!r} is there twice")
        names.add(name)
        yield _read_info(cursor, name)


def _read_info(cursor: _Cursor, name: str) -> _Info:
    num_dims = cursor.u32(f"number of dimensions of tensor {name!r}")
    if not 1 <= num_dims <= g.MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {num_dims} dimensions; 1 to {g.MAX_DIMS} may be")
    dims = [int(cursor.unpack(_I64, f"dimensions of {name!r}")) for _ in range(num_dims)]
    if min(dims) < 1:
        raise cursor.fail(f"tensor {name!r} has dimensions {dims}; each must be at least 1")
    type_id = cursor.u32(f"type of tensor {name!r}")
    kind = g.KIND_OF_TYPE.get(type_id)
    if kind is None:
        raise cursor.fail(f"tensor {name!r}: {g.why_unsupported(type_id)}")
    offset = cursor.u64(f"offset of tensor {name!r}")
    shape = tuple(reversed(dims))
    try:
        size = num_bytes(kind, shape)
    except FormatError as error:
        raise cursor.fail(f"tensor {name!r}: {error.message}") from None
    return _Info(name, kind, shape, offset, size)


def _place(cursor: _Cursor, infos: list[_Info], alignment: int) -> dict[str, StoredTensor]:
    """Views into the data section, where tensors follow each other in order without gaps.

    Python integers do not overflow, so sums of hostile sizes are exact.
    """
    start = _padded(cursor.position, alignment)
    length = len(cursor.data) - start
    expected = 0
    tensors: dict[str, StoredTensor] = {}
    for info in infos:
        _check_offset(cursor, info, expected, alignment)
        if info.offset + info.size > length:
            raise cursor.fail(
                f"tensor {info.name!r} of {info.size} bytes at offset {info.offset} reaches past "
                f"the end of the data section ({max(length, 0)} bytes); is the file complete?"
            )
        first = start + info.offset
        view = cursor.data[first : first + info.size]
        tensors[info.name] = StoredTensor(info.name, info.kind, info.shape, view)
        expected = _padded(info.offset + info.size, alignment)
    return tensors


def _check_offset(cursor: _Cursor, info: _Info, expected: int, alignment: int) -> None:
    if info.offset == expected:
        return
    if info.offset % alignment:
        fault = f"which is not a multiple of the alignment {alignment}"
    elif info.offset < expected:
        fault = f"which overlaps or precedes the tensor before it (expected {expected})"
    else:
        fault = f"which leaves a gap after the tensor before it (expected {expected})"
    raise cursor.fail(f"tensor {info.name!r} is at offset {info.offset}, {fault}")


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _shown(key: str) -> str:
    """A key for a message: escaped, and cut short, since it comes from an untrusted file."""
    return repr(key if len(key) <= 80 else key[:80] + "...")


# ---- shards and sidecars


def _refuse_sidecar(file: GgufFile) -> None:
    for key in ("general.type", "general.architecture"):
        kind = file.metadata.get(key)
        if isinstance(kind, str) and kind in _SIDECARS:
            raise FormatError(
                f"{file.path}: this is not a model but {_SIDECARS[kind]} ({key} is {kind!r}); "
                "give the model file instead"
            )


def _split_keys(file: GgufFile) -> tuple[int, int, int]:
    """split.no, split.count and split.tensors.count."""
    values: list[int] = []
    for key in ("split.no", "split.count", "split.tensors.count"):
        value = file.metadata.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise FormatError(f"{file.path}: {key} of a shard must be a whole number, 0 or more")
        values.append(value)
    return values[0], values[1], values[2]


def _refuse_lone_shard(file: GgufFile) -> None:
    """A part of a set whose name does not say so (renamed), so that its siblings are unknown."""
    if "split.count" in file.metadata and _split_keys(file)[1] > 1:
        number, count, _ = _split_keys(file)
        raise FormatError(
            f"{file.path}: this is shard {number + 1} of {count} but its name does not end in "
            f"-{number + 1:05d}-of-{count:05d}.gguf; restore the names of the set"
        )


def _merge(files: list[GgufFile]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for number, file in enumerate(files):
        split_no, split_count, _ = _split_keys(file)
        if (split_no, split_count) != (number, len(files)):
            raise FormatError(
                f"{file.path}: its name says shard {number + 1} of {len(files)}, its metadata "
                f"shard {split_no + 1} of {split_count}"
            )
        twice = tensors.keys() & file.tensors.keys()
        if twice:
            raise FormatError(f"{file.path}: tensor {min(twice)!r} is in an earlier shard too")
        tensors.update(file.tensors)
    expected = _split_keys(files[0])[2]
    if len(tensors) != expected:
        raise FormatError(
            f"{files[0].path}: split.tensors.count is {expected} but the shards hold "
            f"{len(tensors)} tensors"
        )
    return tensors
