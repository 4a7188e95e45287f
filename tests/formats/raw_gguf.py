"""Builds GGUF bytes by hand, right or wrong: independent of the writer under test.

The layout follows the GGUF specification literally (ggml docs/gguf.md).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return u64(len(data)) + data


def entry(key: str | bytes, kind: int, payload: bytes) -> bytes:
    return string(key) + u32(kind) + payload


def array(key: str, kind: int, count: int, payload: bytes) -> bytes:
    return entry(key, ARRAY, u32(kind) + u64(count) + payload)


def tensor(name: str | bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """`dims` fastest first, as stored."""
    sizes = struct.pack(f"<{len(dims)}q", *dims)
    return string(name) + u32(len(dims)) + sizes + struct.pack("<iQ", kind, offset)


def default_entries() -> list[bytes]:
    return [entry("general.architecture", STRING, string("llama"))]


def default_tensors() -> list[bytes]:
    return [tensor("a", (4, 2), 0, 0), tensor("b", (8,), 0, 32)]


@dataclass
class Raw:
    """The parts of a file; counts are those of the lists unless given."""

    magic: bytes = b"GGUF"
    version: int = 3
    entries: list[bytes] = field(default_factory=default_entries)
    tensors: list[bytes] = field(default_factory=default_tensors)
    data: bytes = bytes(range(64))
    num_tensors: int | None = None
    num_entries: int | None = None
    alignment: int = 32

    def header(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_entries = len(self.entries) if self.num_entries is None else self.num_entries
        start = self.magic + struct.pack("<Iqq", self.version, num_tensors, num_entries)
        return start + b"".join(self.entries) + b"".join(self.tensors)

    def build(self) -> bytes:
        header = self.header()
        return header + bytes(-len(header) % self.alignment) + self.data


def with_entry(raw: bytes) -> bytes:
    """A good file but for one more metadata entry."""
    return Raw(entries=[*default_entries(), raw]).build()


def with_tensors(*raw: bytes, data: bytes = bytes(64)) -> bytes:
    """A good file but for its tensor infos."""
    return Raw(tensors=list(raw), data=data).build()
