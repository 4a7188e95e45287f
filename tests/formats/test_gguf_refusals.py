"""Every way a GGUF file can be malformed ends in one `FormatError` that says what and where.

The list follows the published memory-safety faults of GGUF readers (heap overflows by counts,
strings and array types; size sums that wrap; misplaced tensors). Files: `raw_gguf`.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import raw_gguf as raw

from headrace.errors import FormatError
from headrace.formats import gguf, gguf_types
from headrace.formats.blocks import KINDS

GOOD = raw.Raw().build()
BIG = 2**64 - 1


def cut(data: bytes, size: int) -> bytes:
    return data[:size]


def element_type(kind: int) -> bytes:
    return raw.with_entry(raw.array("k", kind, 1, bytes(8)))


def alignment(kind: int, payload: bytes) -> bytes:
    return raw.with_entry(raw.entry("general.alignment", kind, payload))


def typed(kind: int) -> bytes:
    return raw.with_tensors(raw.tensor("odd.weight", (256,), kind))


def pair(first: bytes, second: bytes) -> bytes:
    return raw.with_tensors(first, second, data=bytes(256))


A = raw.tensor("a", (8,), 0, 0)

MALFORMED: dict[str, tuple[bytes, tuple[str, ...]]] = {
    # header
    "empty": (b"", ("is empty",)),
    "short magic": (b"GG", ("magic", "needs 4 bytes", "2 left")),
    "magic": (b"FUGG" + GOOD[4:], ("not a GGUF file", "FUGG")),
    "zip": (b"PK\x03\x04" + GOOD[4:], ("pickle", "safetensors")),
    "short version": (cut(GOOD, 6), ("version", "at byte 4")),
    "version 0": (raw.Raw(version=0).build(), ("version 0 is not known", "2 and 3")),
    "version 1": (raw.Raw(version=1).build(), ("version 1", "convert")),
    "version 4": (raw.Raw(version=4).build(), ("version 4 is not known",)),
    "big-endian": (raw.Raw(version=0x03000000).build(), ("big-endian",)),
    "short counts": (cut(GOOD, 12), ("tensor count", "needs 8 bytes")),
    "negative tensors": (raw.Raw(num_tensors=-1).build(), ("tensor count -1 is impossible",)),
    "many tensors": (raw.Raw(num_tensors=2**62).build(), ("tensor count", "impossible")),
    "more tensors": (raw.Raw(num_tensors=3).build(), ("tensor name ''", "empty", "at byte")),
    "negative keys": (raw.Raw(num_entries=-5).build(), ("key count -5 is impossible",)),
    "many keys": (raw.Raw(num_entries=2**40).build(), ("key count", "impossible")),
    "more keys": (raw.Raw(num_entries=2).build(), ("a tensor name", "limit is 63")),
    # keys
    "key length": (raw.with_entry(raw.u64(BIG)), ("metadata key", str(BIG), "65535")),
    "key past end": (raw.with_entry(raw.u64(60_000)), ("metadata key", "needs 60000 bytes")),
    "long key": (raw.with_entry(raw.entry("k" * 65536, 0, b"\0")), ("65536", "65535")),
    "empty key": (raw.with_entry(raw.entry("", 0, b"\0")), ("metadata key ''", "ASCII")),
    "space in key": (raw.with_entry(raw.entry("a b", 0, b"\0")), ("'a b'", "ASCII")),
    "escape in key": (raw.with_entry(raw.entry("\x1b[2J", 0, b"\0")), ("'\\x1b[2J'", "ASCII")),
    "unicode key": (raw.with_entry(raw.entry("ü", 0, b"\0")), ("'ü'", "ASCII")),
    "key not UTF-8": (raw.with_entry(raw.entry(b"\xff", 0, b"\0")), ("key", "UTF-8")),
    "key twice": (raw.with_entry(raw.default_entries()[0]), ("'general.architecture'", "twice")),
    # values
    "value type": (raw.with_entry(raw.entry("k", 13, bytes(8))), ("type of 'k' is 13", "0 to 12")),
    "short scalar": (
        raw.Raw(entries=[raw.entry("key", raw.U64, b"")], tensors=[], data=b"").header(),
        ("value of 'key'", "needs 8 bytes", "0 left"),
    ),
    "string length": (
        raw.with_entry(raw.entry("k", raw.STRING, raw.u64(2**63))),
        ("value of 'k'", str(2**63)),
    ),
    "string past end": (
        raw.with_entry(raw.entry("k", raw.STRING, raw.u64(10_000))),
        ("value of 'k'", "10000 bytes"),
    ),
    "string not UTF-8": (
        raw.with_entry(raw.entry("k", raw.STRING, raw.string(b"a\xc3"))),
        ("value of 'k'", "UTF-8"),
    ),
    "surrogate": (
        raw.with_entry(raw.entry("k", raw.STRING, raw.string(b"\xed\xa0\x80"))),
        ("value of 'k'", "UTF-8"),
    ),
    "bool 2": (raw.with_entry(raw.entry("k", raw.BOOL, b"\x02")), ("'k'", "bool", "0 and 1")),
    # arrays
    "nested array": (element_type(raw.ARRAY), ("array 'k'", "nested")),
    "element type": (element_type(99), ("element type of array 'k' is 99",)),
    "bools of 2": (raw.with_entry(raw.array("k", raw.BOOL, 2, b"\1\2")), ("array 'k'", "bool")),
    "long array": (raw.with_entry(raw.array("k", raw.U8, 9999, b"")), ("array 'k'", "9999 bytes")),
    "array size wraps": (
        raw.with_entry(raw.array("k", raw.U64, 2**61, b"")),
        ("array 'k'", f"needs {2**64} bytes"),
    ),
    "array of everything": (raw.with_entry(raw.array("k", raw.F32, BIG, b"")), ("array 'k'",)),
    "many strings": (
        raw.with_entry(raw.array("k", raw.STRING, 2**61, b"")),
        ("array 'k'", f"needs {2**64} bytes"),
    ),
    "element past end": (
        raw.with_entry(raw.array("k", raw.STRING, 2, raw.string("x") + raw.u64(5000))),
        ("element 1 of array 'k'", "past the file's end"),
    ),
    "element length wraps": (
        raw.with_entry(raw.array("k", raw.STRING, 2, raw.u64(BIG - 7) + raw.string("x"))),
        ("element 0 of array 'k'", "past the file's end"),
    ),
    "element without length": (
        raw.Raw(
            entries=[raw.array("k", raw.STRING, 2, raw.string(bytes(13)))], tensors=[], data=b""
        ).header(),
        ("element 1 of array 'k'", "past the end"),
    ),
    "element not UTF-8": (
        raw.with_entry(raw.array("k", raw.STRING, 2, raw.string("x") + raw.string(b"\x80"))),
        ("element 1 of array 'k'", "UTF-8"),
    ),
    # alignment
    "alignment 0": (alignment(raw.U32, raw.u32(0)), ("general.alignment is 0", "power of two")),
    "alignment 4": (alignment(raw.U32, raw.u32(4)), ("general.alignment is 4", "from 8")),
    "alignment 24": (alignment(raw.U32, raw.u32(24)), ("general.alignment is 24",)),
    "alignment 128k": (alignment(raw.U32, raw.u32(1 << 17)), ("131072", "to 65536")),
    "alignment u64": (alignment(raw.U64, raw.u64(32)), ("general.alignment must be a u32",)),
    "alignment text": (alignment(raw.STRING, raw.string("32")), ("must be a u32",)),
    "alignment list": (
        raw.with_entry(raw.array("general.alignment", raw.U32, 1, raw.u32(32))),
        ("general.alignment is [32]",),
    ),
    # tensor infos
    "unnamed tensor": (raw.with_tensors(raw.tensor("", (8,))), ("tensor name ''",)),
    "long tensor name": (raw.with_tensors(raw.tensor("n" * 64, (8,))), ("64 bytes", "63")),
    "tensor name not UTF-8": (raw.with_tensors(raw.tensor(b"\xfe", (8,))), ("name", "UTF-8")),
    "newline in name": (raw.with_tensors(raw.tensor("a\n", (8,))), ("'a\\n'", "printable")),
    "tensor twice": (pair(A, raw.tensor("a", (8,), 0, 32)), ("tensor 'a' is there twice",)),
    "0 dimensions": (raw.with_tensors(raw.tensor("a", ())), ("'a' has 0 dimensions", "1 to 4")),
    "5 dimensions": (raw.with_tensors(raw.tensor("a", (1,) * 5)), ("'a' has 5 dimensions",)),
    "dimension 0": (raw.with_tensors(raw.tensor("a", (8, 0))), ("[8, 0]", "at least 1")),
    "dimension -8": (raw.with_tensors(raw.tensor("a", (-8, -1))), ("[-8, -1]", "at least 1")),
    "size wraps to 0": (
        raw.with_tensors(raw.tensor("a", (2**32, 2**32))),
        ("'a'", f"{2**66} bytes", "past the end"),
    ),
    "size wraps to little": (
        raw.with_tensors(raw.tensor("a", (2**62, 2, 2, 2), 3)),
        ("'a'", "past the end"),
    ),
    "ragged row": (raw.with_tensors(raw.tensor("a", (33,), 2)), ("'a'", "33", "Q4_0", "32")),
    "ragged k-row": (raw.with_tensors(raw.tensor("a", (576,), 12)), ("'a'", "576", "Q4_K")),
    "short info": (cut(GOOD, len(raw.Raw().header()) - 3), ("offset of tensor 'b'", "8 bytes")),
    # places
    "odd offset": (pair(A, raw.tensor("b", (8,), 0, 33)), ("'b'", "33", "alignment 32")),
    "same offset": (pair(A, raw.tensor("b", (8,), 0, 0)), ("'b'", "offset 0", "overlaps")),
    "inside another": (
        pair(raw.tensor("a", (16,), 0, 0), raw.tensor("b", (8,), 0, 32)),
        ("'b'", "offset 32", "overlaps", "64"),
    ),
    "gap": (pair(A, raw.tensor("b", (8,), 0, 64)), ("'b'", "offset 64", "gap", "32")),
    "order": (pair(raw.tensor("a", (8,), 0, 32), raw.tensor("b", (8,), 0, 0)), ("'a'", "gap")),
    "offset wraps": (
        raw.with_tensors(raw.tensor("a", (8,), 0, 2**64 - 32)),
        ("'a'", str(2**64 - 32)),
    ),
    "sum wraps": (
        pair(raw.tensor("a", (2**61 - 8, 2), 0, 0), raw.tensor("b", (16,), 0, 2**64 - 64)),
        ("'a'", f"{2**64 - 64} bytes", "past the end"),
    ),
    "last byte missing": (GOOD[:-1], ("'b'", "63 bytes", "complete")),
    "no data": (raw.Raw(data=b"").header(), ("'a'", "0 bytes", "complete")),
    # types
    "Q8_1": (typed(9), ("'odd.weight'", "type Q8_1 (id 9) is not supported", "Q4_K")),
    "IQ2_XXS": (typed(16), ("type IQ2_XXS (id 16) is not supported",)),
    "IQ1_M": (typed(29), ("type IQ1_M (id 29) is not supported",)),
    "TQ2_0": (typed(35), ("type TQ2_0 (id 35)",)),
    "NVFP4": (typed(40), ("type NVFP4 (id 40)",)),
    "I32": (typed(26), ("type I32 (id 26)",)),
    "retired Q4_2": (typed(4), ("Q4_2", "retired", "re-quantise")),
    "retired Q4_0_8_8": (typed(33), ("Q4_0_8_8", "retired", "re-quantise")),
    "retired or I2_S": (typed(36), ("IQ4_NL_4_4", "I2_S", "ik_llama.cpp")),
    "fork Q6_0": (typed(133), ("Q6_0", "ik_llama.cpp", "re-quantise")),
    "fork IQ4_K": (typed(139), ("IQ4_K", "ik_llama.cpp")),
    "fork rows": (typed(212), ("Q4_K_R4", "ik_llama.cpp")),
    "fork private": (typed(300), ("id 300", "private", "ik_llama.cpp")),
    "unknown type": (typed(9999), ("id 9999 is not known", "F32")),
    "negative type": (typed(-1), ("is not known",)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_files_are_refused_with_the_place_and_the_fault(
    tmp_path: Path, name: str
) -> None:
    data, words = MALFORMED[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        gguf.read_gguf(path)
    for word in ("hostile.gguf", *words):
        assert word in caught.value.message
    assert len(caught.value.message) < 500


def test_malformed_files_take_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    for data, _ in MALFORMED.values():
        path.write_bytes(data)
        tracemalloc.start()
        with pytest.raises(FormatError):
            gguf.read_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000


@pytest.mark.parametrize("size", range(len(GOOD)))
def test_every_truncation_is_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(GOOD[:size])
    with pytest.raises(FormatError):
        gguf.read_gguf(path)


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("MAX_STRINGS", 2, "more than 2 strings"),
        ("MAX_KEYS", 1, "key count 2 is over the limit of 1"),
        ("MAX_TENSORS", 1, "tensor count 2 is over the limit of 1"),
        ("MAX_METADATA_BYTES", 100, "metadata is larger than 100 bytes"),
    ],
)
def test_large_files_meet_limits_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, words: str
) -> None:
    path = tmp_path / "large.gguf"
    texts = b"".join(raw.string("x" * 9) for _ in range(3))
    path.write_bytes(raw.with_entry(raw.array("k", raw.STRING, 3, texts)))
    gguf.read_gguf(path)
    monkeypatch.setattr(gguf_types, limit, value)
    with pytest.raises(FormatError, match=words):
        gguf.read_gguf(path)


def test_every_type_id_is_read_or_named() -> None:
    readable = {kind.type_id for kind in KINDS.values()}
    groups = [readable, gguf_types.UNSUPPORTED.keys(), gguf_types.RETIRED.keys()]
    assert set().union(*groups) == set(range(43))  # ids 0 to 42 of ggml, none forgotten
    assert sum(len(group) for group in groups) == 43


def test_a_folder_or_device_is_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not a regular file"):
        gguf.read_gguf(tmp_path)
    with pytest.raises(FormatError, match="not a regular file"):
        gguf.read_gguf("/dev/null")
