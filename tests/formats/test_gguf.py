"""Reading and writing GGUF files that are right.

Files come from `raw_gguf` (built by hand from the specification) or from the writer; refusals are
in `test_gguf_refusals.py`.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_gguf as raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import FormatError
from headrace.formats import blocks, gguf
from headrace.types import StoredTensor


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def stored(name: str, kind: str, shape: tuple[int, ...], seed: int = 0) -> StoredTensor:
    size = blocks.num_bytes(kind, shape)
    data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return StoredTensor(name, kind, shape, data)


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("version", [2, 3])
def test_reads_tensors_row_major_and_read_only(tmp_path: Path, version: int) -> None:
    file = gguf.read_gguf(save(tmp_path / "m.gguf", raw.Raw(version=version).build()))
    assert file.version == version
    assert list(file.tensors) == ["a", "b"]
    a, b = file.tensors["a"], file.tensors["b"]
    assert (a.name, a.kind, a.shape, b.shape) == ("a", "F32", (2, 4), (8,))
    assert a.data.tobytes() + b.data.tobytes() == bytes(range(64))
    assert a.data.dtype == np.uint8
    with pytest.raises(ValueError, match="read-only"):
        a.data[0] = 1


@pytest.mark.parametrize(
    ("kind", "payload", "expected"),
    [
        (raw.U8, b"\xff", 255),
        (raw.I8, b"\xff", -1),
        (raw.U16, b"\xfe\xff", 65534),
        (raw.I16, b"\xfe\xff", -2),
        (raw.U32, b"\xff\xff\xff\xff", 2**32 - 1),
        (raw.I32, b"\xff\xff\xff\xff", -1),
        (raw.F32, struct.pack("<f", 0.5), 0.5),
        (raw.BOOL, b"\x01", True),
        (raw.BOOL, b"\x00", False),
        (raw.STRING, raw.string("ü"), "ü"),
        (raw.U64, b"\xff" * 8, 2**64 - 1),
        (raw.I64, b"\xff" * 8, -1),
        (raw.F64, struct.pack("<d", 1e-300), 1e-300),
    ],
)
def test_reads_every_scalar_type(
    tmp_path: Path, kind: int, payload: bytes, expected: object
) -> None:
    path = save(tmp_path / "m.gguf", raw.with_entry(raw.entry("k", kind, payload)))
    file = gguf.read_gguf(path)
    assert file.metadata["k"] == expected
    assert type(file.metadata["k"]) is type(expected)
    assert file.value_types["k"] == kind


@pytest.mark.parametrize(
    ("kind", "layout", "values"),
    [
        (raw.U8, "<3B", [1, 2, 255]),
        (raw.I32, "<2i", [-1, 7]),
        (raw.F32, "<2f", [0.25, -3.0]),
        (raw.BOOL, "<3B", [True, False, True]),
        (raw.U64, "<1Q", [2**64 - 1]),
        (raw.F64, "<2d", [1e300, -1e-300]),
        (raw.I16, "<0h", []),
    ],
)
def test_reads_arrays_of_numbers(tmp_path: Path, kind: int, layout: str, values: list[Any]) -> None:
    entry = raw.array("k", kind, len(values), struct.pack(layout, *values))
    value = gguf.read_gguf(save(tmp_path / "m.gguf", raw.with_entry(entry))).metadata["k"]
    assert value.tolist() == values
    assert value.dtype.kind == ("b" if kind == raw.BOOL else value.dtype.kind)
    assert not value.flags.writeable
    assert value.flags.aligned


def test_reads_arrays_of_strings(tmp_path: Path) -> None:
    texts = ["", "a", "▁the", "\0", "é" * 300]
    entry = raw.array("k", raw.STRING, len(texts), b"".join(map(raw.string, texts)))
    file = gguf.read_gguf(save(tmp_path / "m.gguf", raw.with_entry(entry)))
    assert file.metadata["k"] == texts


def test_alignment_moves_the_data(tmp_path: Path) -> None:
    entry = raw.entry("general.alignment", raw.U32, raw.u32(256))
    tensors = [raw.tensor("a", (4, 2), 0, 0), raw.tensor("b", (8,), 0, 256)]
    data = raw.Raw(entries=[entry], tensors=tensors, data=bytes(256) + b"\x01" * 32, alignment=256)
    file = gguf.read_gguf(save(tmp_path / "m.gguf", data.build()))
    assert file.alignment == 256
    assert file.tensors["b"].data.tobytes() == b"\x01" * 32


def test_a_file_without_tensors_is_a_vocabulary(tmp_path: Path) -> None:
    data = raw.Raw(tensors=[], data=b"").header()
    assert gguf.read_gguf(save(tmp_path / "m.gguf", data)).tensors == {}


def test_the_writer_makes_the_bytes_of_the_specification(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "a": 7,
        "b": -7,
        "c": 1.5,
        "d": True,
        "e": ["x", "yz"],
        "f": np.array([1, -2], np.int16),
        "g": np.uint8(9),
        "h": [1, 2],
        "i": 2**40,
    }
    expected = raw.Raw(
        entries=[
            *raw.default_entries(),
            raw.entry("a", raw.U32, raw.u32(7)),
            raw.entry("b", raw.I32, struct.pack("<i", -7)),
            raw.entry("c", raw.F32, struct.pack("<f", 1.5)),
            raw.entry("d", raw.BOOL, b"\x01"),
            raw.array("e", raw.STRING, 2, raw.string("x") + raw.string("yz")),
            raw.array("f", raw.I16, 2, struct.pack("<2h", 1, -2)),
            raw.entry("g", raw.U8, b"\x09"),
            raw.array("h", raw.I32, 2, struct.pack("<2i", 1, 2)),
            raw.entry("i", raw.I64, struct.pack("<q", 2**40)),
        ],
        tensors=[raw.tensor("a", (4, 2), 0, 0), raw.tensor("q", (32, 2), 2, 32)],
        data=bytes(range(68)) + bytes(28),
    )
    data = np.arange(68, dtype=np.uint8)
    tensors = [
        StoredTensor("a", "F32", (2, 4), data[:32]),
        StoredTensor("q", "Q4_0", (2, 32), data[32:]),
    ]
    gguf.write_gguf(tmp_path / "m.gguf", metadata, tensors)
    assert (tmp_path / "m.gguf").read_bytes() == expected.build()


NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=63)
INTEGERS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(width=32, allow_nan=False)
VALUES = st.one_of(
    INTEGERS,
    FLOATS,
    st.booleans(),
    st.text(max_size=50),
    st.lists(st.text(max_size=9), max_size=9),
    st.lists(st.booleans(), min_size=1, max_size=9),
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9),
    st.lists(FLOATS, min_size=1, max_size=9),
)
SHAPES = st.lists(st.integers(1, 3), max_size=3).map(lambda outer: (*outer, 256))
TENSORS = st.builds(stored, NAMES, st.sampled_from(sorted(blocks.KINDS)), SHAPES, st.integers(0, 9))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    metadata=st.dictionaries(NAMES, VALUES, max_size=6),
    tensors=st.lists(TENSORS, max_size=5, unique_by=lambda tensor: tensor.name),
    alignment=st.sampled_from([8, 32, 256]),
)
def test_what_is_written_is_read(
    tmp_path: Path, metadata: dict[str, Any], tensors: list[StoredTensor], alignment: int
) -> None:
    metadata = {**metadata, "general.alignment": alignment}
    gguf.write_gguf(tmp_path / "m.gguf", metadata, tensors)
    file = gguf.read_gguf(tmp_path / "m.gguf")
    assert {key: plain(value) for key, value in file.metadata.items()} == metadata
    assert list(file.metadata) == list(metadata)
    read = [(t.name, t.kind, t.shape, t.data.tobytes()) for t in file.tensors.values()]
    assert read == [(t.name, t.kind, t.shape, t.data.tobytes()) for t in tensors]


@pytest.mark.parametrize(
    ("metadata", "tensors", "words"),
    [
        ({"a b": 1}, [], "'a b'"),
        ({"a": 2**64}, [], "64 bits"),
        ({"a": 1e39}, [], "F32"),
        ({"a": None}, [], "NoneType"),
        ({"a": [1, "x"]}, [], "list of int, str"),
        ({"a": np.zeros((2, 2))}, [], "one dimension"),
        ({"a": np.zeros(2, np.float16)}, [], "float16"),
        ({"general.alignment": 24}, [], "power of two"),
        ({}, [stored("x" * 64, "F32", (1,))], "63 bytes"),
        ({}, [stored("x", "F32", (1, 1, 1, 1, 1))], "shape"),
        ({}, [stored("x", "F32", (0,))], "shape"),
        ({}, [stored("x", "F32", (1,)), stored("x", "F32", (1,))], "same name"),
        ({}, [StoredTensor("x", "Q4_0", (32,), np.zeros(17, np.uint8))], "18 bytes, got 17"),
    ],
)
def test_the_writer_refuses_what_the_format_cannot_hold(
    tmp_path: Path, metadata: dict[str, Any], tensors: list[StoredTensor], words: str
) -> None:
    with pytest.raises(FormatError, match=words):
        gguf.write_gguf(tmp_path / "m.gguf", metadata, tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disk_is_full(descriptor: int) -> None:
        raise OSError("no space left")

    path = save(tmp_path / "m.gguf", b"old")
    monkeypatch.setattr(os, "fsync", disk_is_full)
    with pytest.raises(OSError, match="no space"):
        gguf.write_gguf(path, {}, [stored("x", "F32", (1,))])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


# ---- shards


def write_shards(folder: Path, count: int = 3) -> list[Path]:
    """One tensor per shard, t0, t1, ..."""
    paths = [folder / f"m-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for number, path in enumerate(paths):
        split = shard_keys(number, count, count)
        metadata = {"general.architecture": "llama", **split} if number == 0 else split
        gguf.write_gguf(path, metadata, [stored(f"t{number}", "F32", (4,), number)])
    return paths


def shard_keys(number: int, count: int, num_tensors: int) -> dict[str, Any]:
    return {
        "split.no": np.uint16(number),
        "split.count": np.uint16(count),
        "split.tensors.count": np.int32(num_tensors),
    }


@pytest.mark.parametrize("given", [0, 1, 2])
def test_any_shard_opens_the_set(tmp_path: Path, given: int) -> None:
    paths = write_shards(tmp_path)
    checkpoint = gguf.open_gguf(paths[given])
    assert checkpoint.path == str(paths[0])
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert list(checkpoint.tensors) == ["t0", "t1", "t2"]
    for number in range(3):
        expected = stored("", "F32", (4,), number).data
        assert checkpoint.tensors[f"t{number}"].data.tobytes() == expected.tobytes()


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[1].unlink()
    with pytest.raises(FormatError, match=r"1 of 3 shards are missing.*m-00002-of-00003"):
        gguf.open_gguf(paths[0])


def test_a_shard_of_another_number_is_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(FormatError, match="name says shard 2 of 3, its metadata shard 3 of 3"):
        gguf.open_gguf(paths[0])


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    gguf.write_gguf(paths[2], shard_keys(2, 3, 3), [stored("t0", "F32", (4,))])
    with pytest.raises(FormatError, match="'t0' is in an earlier shard"):
        gguf.open_gguf(paths[0])


def test_a_wrong_tensor_total_is_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    gguf.write_gguf(paths[0], shard_keys(0, 3, 4), [stored("t0", "F32", (4,))])
    with pytest.raises(FormatError, match=r"split.tensors.count is 4 .* hold 3"):
        gguf.open_gguf(paths[0])


@pytest.mark.parametrize("value", ["1", np.array([1], np.uint16), ["1"] * 9, -1, True])
def test_split_keys_of_the_wrong_type_are_refused(tmp_path: Path, value: object) -> None:
    paths = write_shards(tmp_path)
    keys = {**shard_keys(0, 3, 3), "split.no": value}
    gguf.write_gguf(paths[0], keys, [stored("t0", "F32", (4,))])
    with pytest.raises(FormatError, match=r"split.no"):
        gguf.open_gguf(paths[0])


def test_shard_names_without_split_keys_are_refused(tmp_path: Path) -> None:
    paths = write_shards(tmp_path)
    gguf.write_gguf(paths[0], {}, [stored("t0", "F32", (4,))])
    with pytest.raises(FormatError, match=r"split.no of a shard must be"):
        gguf.open_gguf(paths[0])


def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    renamed = write_shards(tmp_path)[1].rename(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match="shard 2 of 3 but its name does not end in -00002-of"):
        gguf.open_gguf(renamed)


def test_impossible_shard_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="shard 4 of 3"):
        gguf.open_gguf(tmp_path / "m-00004-of-00003.gguf")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("general.architecture", "clip", "projector"),
        ("general.type", "mmproj", "projector"),
        ("general.type", "adapter", "LoRA"),
        ("general.type", "imatrix", "importance matrix"),
        ("general.architecture", "controlvector", "control vector"),
    ],
)
def test_sidecars_are_refused_with_an_explanation(
    tmp_path: Path, key: str, value: str, words: str
) -> None:
    metadata = {"general.architecture": "llama", key: value}
    gguf.write_gguf(tmp_path / "m.gguf", metadata, [stored("t", "F32", (1,))])
    with pytest.raises(FormatError, match=words):
        gguf.open_gguf(tmp_path / "m.gguf")
    assert gguf.read_gguf(tmp_path / "m.gguf").metadata[key] == value
