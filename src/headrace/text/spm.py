"""SentencePiece vocabularies (GGUF model "llama"): BPE by score, byte fallback, ▁ for a space.

The merging is the `sentencepiece` library's. GGUF keeps pieces, scores and types, not the
original model file; this writes a ModelProto around them in memory, by hand, since the wire format
needs three field kinds and the protobuf package costs more to import than the model to load.
User-defined pieces are found before merging, as llama.cpp does. Source: sentencepiece_model.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from sentencepiece import SentencePieceProcessor

from headrace.text.splitter import Splitter
from headrace.text.vocabulary import (
    BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    TokenTable,
    Vocabulary,
    byte_values,
    scores,
    token_table,
)

SPACE = "\u2581"
_MODEL_TYPE_BPE = 2


class SpmCodec:
    """A `Codec` over `sentencepiece`. `adds_space`: a text, and what follows a token found whole,
    starts with a space that is not in the text."""

    def __init__(self, vocabulary: Vocabulary, *, adds_space: bool, eats_space: bool) -> None:
        self._pieces = vocabulary.pieces
        self._bytes = byte_values(vocabulary)
        self._user_defined = frozenset(vocabulary.ids_of(USER_DEFINED))
        self._adds_space = adds_space
        plain = {vocabulary.pieces[i]: i for i in self._user_defined}
        control = {vocabulary.pieces[i]: i for i in vocabulary.ids_of(CONTROL, UNKNOWN)}
        eaters = frozenset(control.values()) if eats_space else frozenset()
        self._plain = Splitter(plain, eaters)
        self._special = Splitter(plain | control, eaters)
        self._merger = _processor(vocabulary)

    def encode(self, text: str, *, parse_special: bool, sentinel: str = "") -> list[int]:
        ids: list[int] = []
        for part in (self._special if parse_special else self._plain).split(text):
            if isinstance(part, int):
                ids.append(part)
            elif sentinel and sentinel in part:
                ids += self.encode(part.replace(sentinel, ""), parse_special=False)
            else:
                ids += self._merger.encode(" " + part if self._adds_space else part)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._bytes:
            return bytes([self._bytes[token_id]])
        piece = self._pieces[token_id]
        if token_id in self._user_defined:
            return piece.encode("utf-8")
        return piece.replace(SPACE, " ").encode("utf-8")

    def token_text(self, token_id: int) -> str:
        return self._pieces[token_id]


def load_spm(vocabulary: Vocabulary) -> tuple[SpmCodec, TokenTable]:
    """Codec and table of a vocabulary of model "llama"."""
    adds_space = vocabulary.flag("add_space_prefix", True)
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    # The original tokenizer of Phi-3 strips white space after its tokens; GGUF has no key for
    # that, and llama.cpp goes by the model's name too.
    eats_space = "phi-3" in name or "phi3" in name
    codec = SpmCodec(vocabulary, adds_space=adds_space, eats_space=eats_space)
    merges_unknown = len(byte_values(vocabulary)) < 256
    table = token_table(
        vocabulary,
        add_bos=True,
        strips_space=adds_space,
        drops_text=eats_space or merges_unknown,
    )
    return codec, table


# ---- the ModelProto
#


def _processor(vocabulary: Vocabulary) -> SentencePieceProcessor:
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(_model_proto(vocabulary))
    except RuntimeError as error:
        raise vocabulary.fail(f"the vocabulary is not a SentencePiece model ({error})") from None
    return processor


def _model_proto(vocabulary: Vocabulary) -> bytes:
    """ModelProto: pieces (1), trainer_spec (2), normalizer_spec (3)."""
    unknown_id = _unknown_id(vocabulary)
    pieces = [piece or f"<empty {i}>" for i, piece in enumerate(vocabulary.pieces)]
    kinds = _inner_kinds(vocabulary, unknown_id)
    has_bytes = kinds.count(BYTE) == 256
    trainer = _number(3, _MODEL_TYPE_BPE) + _number(4, len(pieces)) + _number(35, has_bytes)
    trainer += _bytes(45, pieces[unknown_id].encode("utf-8"))
    # No dummy prefix (added here, as llama.cpp does), spaces kept and written as ▁.
    normalizer = _bytes(1, b"identity") + _number(3, 0) + _number(4, 0) + _number(5, 1)
    packed = _pack_pieces(pieces, scores(vocabulary), kinds)
    return packed + _bytes(2, trainer) + _bytes(3, normalizer)


def _unknown_id(vocabulary: Vocabulary) -> int:
    """The token for what has no pieces. Files give the type to padding tokens too (Phi-3)."""
    unknown = vocabulary.ids_of(UNKNOWN)
    declared = vocabulary.special_ids.get("unknown", 0)
    return declared if declared in unknown or not unknown else unknown[0]


def _inner_kinds(vocabulary: Vocabulary, unknown_id: int) -> list[int]:
    """Types as sentencepiece wants them: one unknown piece, and nothing that is matched whole (the
    splitter has found those, so they are control pieces here, which text never gives)."""
    kinds = list(vocabulary.kinds)
    for token_id in vocabulary.ids_of(USER_DEFINED, UNKNOWN):
        kinds[token_id] = CONTROL
    for token_id, piece in enumerate(vocabulary.pieces):
        if not piece:
            kinds[token_id] = CONTROL
    kinds[unknown_id] = UNKNOWN
    return kinds


def _pack_pieces(pieces: Sequence[str], values: Sequence[float], kinds: Sequence[int]) -> bytes:
    """One SentencePiece message each: piece (1, string), score (2, float), type (3, enum).

    A quarter of a million of them: all that depends on the length alone is written once.
    """
    floats = struct.pack(f"<{len(values)}f", *values)
    heads: dict[int, bytes] = {}
    tails = [b"\x18%c" % kind for kind in range(8)]
    parts: list[bytes] = []
    for i, piece in enumerate(pieces):
        text = piece.encode("utf-8")
        head = heads.get(len(text))
        if head is None:
            head = heads.setdefault(len(text), _piece_head(len(text)))
        parts += (head, text, b"\x15", floats[4 * i : 4 * i + 4], tails[kinds[i]])
    return b"".join(parts)


def _piece_head(length: int) -> bytes:
    string = b"\x0a" + _varint(length)
    return b"\x0a" + _varint(len(string) + length + 5 + 2) + string


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
