"""The byte-level alphabet: 256 printable characters that stand for the 256 bytes.

Byte-level BPE writes its pieces in it, so that every piece is readable text. Bytes that are
printable in Latin-1 stand for themselves, the others for U+0100 and following, in order.
Source: the GPT-2 release (encoder.py); `tokenizers` names the encoding ByteLevel.
"""

from __future__ import annotations

from collections.abc import Mapping

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def _alphabet() -> dict[str, int]:
    others = (byte for byte in range(256) if byte not in _PRINTABLE)
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in _PRINTABLE} | shifted


BYTE_OF_CHAR: Mapping[str, int] = _alphabet()


def piece_bytes(piece: str) -> bytes:
    """Bytes of a piece; one with a character outside the alphabet is taken as plain text."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8")
