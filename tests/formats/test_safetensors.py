"""Reading safetensors: right files, every malformed kind, and sharded models."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_safetensors import GOOD, GOOD_HEADER, build, entry

from headrace.errors import FormatError
from headrace.formats import json_files, safetensors


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_reads_tensors_read_only(tmp_path: Path) -> None:
    tensors = safetensors.read_safetensors(save(tmp_path / "m.safetensors", GOOD))
    assert [(t.name, t.kind, t.shape) for t in tensors.values()] == [
        ("a", "F32", (2, 2)),
        ("b", "BF16", (4,)),
        ("c", "F16", (2,)),
    ]
    assert b"".join(t.data.tobytes() for t in tensors.values()) == bytes(range(28))
    assert all(not t.data.flags.writeable and t.data.dtype == np.uint8 for t in tensors.values())


def test_header_order_need_not_be_data_order(tmp_path: Path) -> None:
    header = {
        "b": entry("F32", [1], 4, 8),
        "a": entry("F32", [1], 0, 4),
        "s": entry("F16", [], 8, 10),
    }
    data = save(tmp_path / "m.safetensors", build(header, bytes(range(10))))
    tensors = safetensors.read_safetensors(data)
    assert tensors["b"].data.tolist() == [4, 5, 6, 7]
    assert tensors["s"].shape == ()


def test_empty_tensors_and_padded_headers_are_legal(tmp_path: Path) -> None:
    header = json.dumps({"a": entry("F32", [0, 3], 0, 0), "b": entry("F32", [1], 0, 4)}) + "     "
    path = save(tmp_path / "m.safetensors", build(header.encode(), bytes(4)))
    assert safetensors.read_safetensors(path)["a"].data.size == 0


def test_known_buffers_are_skipped(tmp_path: Path) -> None:
    header = {
        "embeddings.position_ids": entry("I64", [1, 2], 0, 16),
        "w": entry("F32", [1], 16, 20),
    }
    path = save(tmp_path / "m.safetensors", build(header, bytes(20)))
    assert list(safetensors.read_safetensors(path)) == ["w"]


ONE = entry("F32", [1], 0, 4)


def one(**changes: Any) -> bytes:
    return build({"layer.w": {**ONE, **changes}}, bytes(4))


MALFORMED: dict[str, tuple[bytes, tuple[str, ...]]] = {
    "empty": (b"", ("is empty",)),
    "seven bytes": (GOOD[:7], ("7 bytes", "too few")),
    "cut header": (GOOD[:40], ("header claims",)),
    "cut data": (GOOD[:-1], ("'c'", "ends at byte 28", "27", "complete")),
    "huge header": (build(b"{}", size=2**63), (str(2**63), "100000000")),
    "header over limit": (build(b"{}", size=100_000_001), ("100000001", "100000000")),
    "pickle": (b"\x80\x02" + GOOD, ("pickle",)),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", ("LFS", "git lfs pull")),
    "no brace": (build(b" {}"), ("does not start",)),
    "list": (build(b"[]"), ("does not start",)),
    "not JSON": (build(b"{'a'}"), ("header", "JSON")),
    "trailing text": (build(b"{} x"), ("header", "JSON")),
    "not UTF-8": (build(b'{"\xff":1}'), ("header", "JSON")),
    "NaN": (build(b'{"a":NaN}'), ("NaN",)),
    "deep": (build(b'{"a":' + b"[" * 100_000), ("nested too deeply",)),
    "long number": (build(b'{"a":' + b"9" * 5000 + b"}"), ("header", "JSON")),
    "name twice": (build(b'{"a":1,"a":2}'), ("'a' is there twice",)),
    "key twice": (build(b'{"a":{"dtype":"F32","dtype":"F16"}}'), ("'dtype' is there twice",)),
    "empty name": (build({"": ONE}, bytes(4)), ("name ''",)),
    "long name": (build({"n" * 2000: ONE}, bytes(4)), ("2000 characters", "1024")),
    "notes": (build({"__metadata__": {"a": 1}}), ("__metadata__", "texts")),
    "entry is a list": (build({"w": [1]}), ("'w'", "dtype, shape and data_offsets")),
    "entry lacks shape": (build({"w": {"dtype": "F32"}}), ("'w'", "shape")),
    "entry has more": (one(extra=1), ("'layer.w'", "exactly")),
    "dtype is a number": (one(dtype=7), ("'layer.w'", "unknown dtype")),
    "unknown dtype": (one(dtype="F31"), ("'layer.w'", "unknown dtype 'F31'")),
    "shape is a text": (one(shape="1"), ("'layer.w'", "malformed shape")),
    "shape has a float": (one(shape=[1.0]), ("'layer.w'", "malformed shape")),
    "shape has a bool": (one(shape=[True]), ("'layer.w'", "malformed shape")),
    "shape is negative": (one(shape=[-1, -1]), ("'layer.w'", "malformed shape")),
    "shape is huge": (one(shape=[2**64]), ("'layer.w'", "malformed shape")),
    "many dimensions": (one(shape=[1] * 9), ("'layer.w'", "malformed shape", "8")),
    "shape wraps": (one(shape=[2**32, 2**32]), ("'layer.w'", "needs")),
    "three offsets": (one(data_offsets=[0, 4, 8]), ("'layer.w'", "malformed data_offsets")),
    "negative offset": (one(data_offsets=[-4, 0]), ("'layer.w'", "malformed data_offsets")),
    "float offset": (one(data_offsets=[0, 4.0]), ("'layer.w'", "malformed data_offsets")),
    "backward offsets": (one(data_offsets=[4, 0]), ("'layer.w'", "malformed data_offsets")),
    "short span": (one(data_offsets=[0, 3]), ("'layer.w'", "needs 4 bytes", "hold 3")),
    "long span": (one(data_offsets=[0, 8]), ("'layer.w'", "needs 4 bytes", "hold 8")),
    "past end": (one(data_offsets=[4, 8]), ("'layer.w'", "ends at byte 8", "complete")),
    "past 2^63": (one(data_offsets=[2**63 - 4, 2**63]), ("'layer.w'", "malformed")),
    "bytes left over": (build({"w": ONE}, bytes(5)), ("end at byte 4", "5")),
    "hole at start": (
        build({"w": entry("F32", [1], 4, 8)}, bytes(8)),
        ("'w'", "hole"),
    ),
    "overlap": (
        build({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)),
        ("'b'", "overlaps"),
    ),
    "same place": (build({"a": ONE, "b": ONE}, bytes(4)), ("'b'", "overlaps")),
    "FP8": (one(dtype="F8_E4M3", shape=[4]), ("'layer.w'", "F8_E4M3", "FP8")),
    "F64": (build({"w": entry("F64", [1], 0, 8)}, bytes(8)), ("'w'", "F64", "BF16")),
    "GPTQ": (
        build({"model.q_proj.qweight": entry("I32", [1], 0, 4)}, bytes(4)),
        ("qweight", "I32", "GPTQ"),
    ),
    "float buffer": (
        build({"position_ids": entry("F64", [1], 0, 8)}, bytes(8)),
        ("position_ids", "F64"),
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_refused_with_the_place_and_the_fault(
    tmp_path: Path, name: str
) -> None:
    data, words = MALFORMED[name]
    path = save(tmp_path / "hostile.safetensors", data)
    tracemalloc.start()
    with pytest.raises(FormatError) as caught:
        safetensors.read_safetensors(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for word in ("hostile.safetensors", *words):
        assert word in caught.value.message
    assert len(caught.value.message) < 500
    assert peak < 4_000_000


def test_headers_with_too_many_values_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_files, "MAX_COMMAS", 5)
    with pytest.raises(FormatError, match="more than 5 values"):
        safetensors.read_safetensors(save(tmp_path / "m.safetensors", GOOD))


# ---- shards


def write_sharded(folder: Path, **changes: Any) -> Path:
    """w1 in s1, w2 in s2, and an index; `changes` replace entries of its weight_map."""
    save(folder / "s1.safetensors", build({"w1": ONE}, b"\1" * 4))
    save(folder / "s2.safetensors", build({"w2": ONE}, b"\2" * 4))
    weight_map = {"w1": "s1.safetensors", "w2": "s2.safetensors", **changes}
    weight_map = {name: file for name, file in weight_map.items() if file != "absent"}
    index = {"metadata": {"total_size": 8}, "weight_map": weight_map}
    return save(folder / safetensors.INDEX_NAME, json.dumps(index).encode())


def test_reads_shards(tmp_path: Path) -> None:
    tensors = safetensors.read_sharded(write_sharded(tmp_path))
    assert {name: t.data.tobytes() for name, t in tensors.items()} == {
        "w1": b"\1" * 4,
        "w2": b"\2" * 4,
    }


@pytest.mark.parametrize(
    "name",
    [
        "../s1.safetensors",
        "/etc/s1.safetensors",
        "a/s1.safetensors",
        "a\\s1.safetensors",
        ".safetensors",
        "..",
        "",
        "s1.bin",
        "s1\0.safetensors",
        7,
        None,
        ["s1.safetensors"],
    ],
)
def test_shard_names_that_leave_the_folder_are_refused(tmp_path: Path, name: object) -> None:
    index = write_sharded(tmp_path, w1=name)
    with pytest.raises(FormatError, match=r"tensor 'w1' is .* plain name"):
        safetensors.read_sharded(index)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    index = write_sharded(tmp_path)
    (tmp_path / "s2.safetensors").unlink()
    with pytest.raises(FormatError, match=r"1 of 2 shards are missing.*s2\.safetensors"):
        safetensors.read_sharded(index)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"w1": "s2.safetensors"}, "no shard holds the tensor 'w1'"),
        ({"w3": "s2.safetensors"}, "no shard holds the tensor 'w3'"),
        ({"w2": "absent", "x": "s2.safetensors"}, "'w2' is in shard .* the index says nowhere"),
    ],
)
def test_an_index_that_disagrees_with_its_shards_is_refused(
    tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(FormatError, match=words):
        safetensors.read_sharded(write_sharded(tmp_path, **changes))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    index = write_sharded(tmp_path)
    header = {"w1": ONE, "w2": entry("F32", [1], 4, 8)}
    save(tmp_path / "s2.safetensors", build(header, bytes(8)))
    with pytest.raises(FormatError, match=r"'w1' is in shard 's2.safetensors', the index says in"):
        safetensors.read_sharded(index)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {}}, {"weight_map": 1}])
def test_an_index_without_a_map_is_refused(tmp_path: Path, index: object) -> None:
    path = save(tmp_path / safetensors.INDEX_NAME, json.dumps(index).encode())
    with pytest.raises(FormatError, match="weight_map"):
        safetensors.read_sharded(path)


def test_the_good_header_is_good() -> None:
    """Guards the table above: what it changes is what makes a file bad."""
    assert json.loads(GOOD[8 : 8 + GOOD[0]]) == GOOD_HEADER
