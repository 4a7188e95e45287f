"""Safetensors: one file, or shards with an index; memory-mapped, every offset checked.

Stricter than the published format only in dtypes: weights are F32, F16 or BF16. Integer and bool
tensors are skipped when their last name part is a known buffer (`BUFFERS`: such as BERT's
`embeddings.position_ids`), which no model reads; any other dtype is refused by name at open,
since an ignored weight would be a silently wrong model.
Source: the format section of the safetensors README (8-byte length, JSON header, data).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError
from headrace.formats.json_files import parse_json, read_json
from headrace.formats.mapped import map_file, refuse_mistakes
from headrace.types import StoredTensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own reader
MAX_NAME_CHARS = 1024
MAX_DIMS = 8
KIND_OF_DTYPE: Mapping[str, str] = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
BITS_OF_DTYPE: Mapping[str, int] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
BUFFERS = frozenset({"position_ids", "token_type_ids", "num_batches_tracked"})
BUFFER_DTYPES = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})


def read_safetensors(path: str | Path) -> dict[str, StoredTensor]:
    """The weights of one file, in file order.

    **Raises** `FormatError` that names the file, the tensor and the fault.
    """
    path = Path(path)
    data = map_file(path)
    header, start = _read_header(data, path)
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            _check_notes(entry, path)
            continue
        dtype, shape, begin, end = _parse_entry(name, entry, path)
        _check_size(name, dtype, shape, (begin, end), path)
        spans.append((begin, end, name))
        if end > len(data) - start:
            raise FormatError(
                f"{path}: tensor {name!r} ends at byte {end} of the data, which has "
                f"{len(data) - start}; is the file complete?"
            )
        if _is_weight(name, dtype, path):
            view = data[start + begin : start + end]
            tensors[name] = StoredTensor(name, KIND_OF_DTYPE[dtype], shape, view)
    _check_spans(spans, len(data) - start, path)
    return tensors


def read_sharded(index_path: str | Path) -> dict[str, StoredTensor]:
    """The weights that an index file spreads over shards in its folder."""
    index_path = Path(index_path)
    weight_map = _weight_map(index_path)
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (index_path.parent / name).is_file()]
    if missing:
        raise FormatError(
            f"{index_path}: {len(missing)} of {len(shards)} shards are missing, the first is "
            f"{missing[0]!r}; download the model again"
        )
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        for name, tensor in read_safetensors(index_path.parent / shard).items():
            if weight_map.get(name) != shard:
                where = f"in {weight_map[name]!r}" if name in weight_map else "nowhere"
                raise FormatError(
                    f"{index_path}: tensor {name!r} is in shard {shard!r}, the index says {where}"
                )
            tensors[name] = tensor
    absent = [name for name in weight_map if name not in tensors and not _is_buffer_name(name)]
    if absent:
        raise FormatError(f"{index_path}: no shard holds the tensor {absent[0]!r} of the index")
    return tensors


def _weight_map(index_path: Path) -> dict[str, str]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index_path}: weight_map must be an object that is not empty")
    for name, shard in weight_map.items():
        is_plain = isinstance(shard, str) and shard.endswith(".safetensors")
        if not is_plain or "/" in shard or "\\" in shard or "\0" in shard or shard[0] == ".":
            raise FormatError(
                f"{index_path}: the file of tensor {name[:80]!r} is {str(shard)[:80]!r}; it must "
                "be the plain name of a .safetensors file in the same folder"
            )
    return weight_map


def _read_header(data: NDArray[np.uint8], path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header, and where the data starts."""
    refuse_mistakes(path, data)
    if len(data) < 8:
        raise FormatError(f"{path}: has {len(data)} bytes, too few for a safetensors file")
    size = int.from_bytes(data[:8].tobytes(), "little")
    if size > MAX_HEADER_BYTES or size > len(data) - 8:
        raise FormatError(
            f"{path}: the header claims {size} bytes; {len(data) - 8} are there and "
            f"{MAX_HEADER_BYTES} is the limit; this may not be a safetensors file"
        )
    raw = data[8 : 8 + size].tobytes()
    if not raw.startswith(b"{"):
        raise FormatError(f"{path}: the header does not start with '{{'")
    return parse_json(raw, f"{path}: header"), 8 + size


def _check_notes(notes: object, path: Path) -> None:
    if not isinstance(notes, dict) or not all(isinstance(text, str) for text in notes.values()):
        raise FormatError(f"{path}: __metadata__ must map texts to texts")


def _parse_entry(name: str, entry: object, path: Path) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape, begin, end, each of its type and none negative."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise FormatError(
            f"{path}: tensor name {name[:80]!r} has {len(name)} characters; "
            f"1 to {MAX_NAME_CHARS} may be"
        )
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise FormatError(
            f"{path}: tensor {name!r} must have exactly dtype, shape and data_offsets"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS_OF_DTYPE:
        raise FormatError(f"{path}: tensor {name!r} has the unknown dtype {str(dtype)[:40]!r}")
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        raise FormatError(f"{path}: tensor {name!r} has a malformed shape (up to {MAX_DIMS} sizes)")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(f"{path}: tensor {name!r} has malformed data_offsets")
    return dtype, tuple(shape), offsets[0], offsets[1]


_ENTRY_KEYS = {"dtype", "shape", "data_offsets"}


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
        for value in values
    )


def _check_size(
    name: str, dtype: str, shape: tuple[int, ...], span: tuple[int, int], path: Path
) -> None:
    bits = math.prod(shape) * BITS_OF_DTYPE[dtype]
    if bits != 8 * (span[1] - span[0]):
        raise FormatError(
            f"{path}: tensor {name!r} of dtype {dtype} and shape {list(shape)} needs {bits // 8} "
            f"bytes but its data_offsets {list(span)} hold {span[1] - span[0]}"
        )


def _is_weight(name: str, dtype: str, path: Path) -> bool:
    """False for a known buffer. **Raises** for a dtype that no model here can use."""
    if dtype in KIND_OF_DTYPE:
        return True
    if dtype in BUFFER_DTYPES and _is_buffer_name(name):
        return False
    raise FormatError(
        f"{path}: tensor {name!r} has dtype {dtype}; weights must be "
        f"{', '.join(KIND_OF_DTYPE)} (quantised checkpoints such as GPTQ, AWQ and FP8 are not "
        "supported: use the original weights or a GGUF file)"
    )


def _is_buffer_name(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in BUFFERS


def _check_spans(spans: list[tuple[int, int, str]], length: int, path: Path) -> None:
    """Tensors cover the data section exactly: nothing overlaps, nothing is hidden between."""
    expected = 0
    for begin, end, name in sorted(spans):
        if begin != expected:
            fault = "overlaps another tensor" if begin < expected else "leaves a hole before it"
            raise FormatError(
                f"{path}: tensor {name!r} starts at byte {begin} of the data and {fault} "
                f"(expected {expected})"
            )
        expected = end
    if expected != length:
        raise FormatError(
            f"{path}: the tensors end at byte {expected} of the data but it has {length}; "
            "bytes that belong to no tensor are refused"
        )
