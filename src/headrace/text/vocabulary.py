"""The token list of a GGUF file, checked, and what every tokenizer must be able to say.

No encoding here: `bpe` and `spm` build on `Vocabulary`, `huggingface` on a tokenizer.json; all
give a `Codec` and a `TokenTable`. Every list and id is checked once, at load: a bad byte token or
an id outside the vocabulary has been a memory bug in other engines. Key names: the GGUF
specification (tokenizer.ggml.*); defaults and end-of-turn texts: llama.cpp, October 2026.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from headrace.errors import FormatError
from headrace.types import Checkpoint

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6

MAX_TOKENS = 1 << 21  # the largest known vocabulary is 262,144
MAX_PIECE_CHARS = 4096  # longest known piece: 256; a cap, so that no file costs quadratic work
MAX_MERGES = 1 << 22

# Texts that end a turn. A file that has one but gives it another type is wrong about it: content
# must not be able to spell it, so it counts as a control token.
END_TEXTS: Final = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eos|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)
_MAX_SCORE = 3.4e38  # of a 32-bit float
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_PREFIX = "tokenizer.ggml."


class Codec(Protocol):
    """One vocabulary's way from text to ids and from an id to bytes. Thread-safe."""

    def encode(self, text: str, *, parse_special: bool, sentinel: str = "") -> list[int]:
        """Ids of `text`, nothing added in front or behind.

        `sentinel`: a character to drop after special tokens have been found and before ordinary
        text is encoded, so that it can break up what must not be found.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes an ordinary token stands for."""

    def token_text(self, token_id: int) -> str:
        """The piece as the vocabulary writes it."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """What a vocabulary says about its ids. `prefix_ids` and `suffix_ids` are what `add_special`
    puts around a text; `special_tokens` maps the text of each control token to its id;
    `strips_space`: the first ordinary token of a text carries a space that is not in the text.
    `chat_bos_id`: begins a chat whose template does not write it (llama.cpp adds it for GGUF,
    transformers does not for its folders). `max_token_chars`: no token stands for more characters
    of a text; None when that is not known."""

    size: int
    control_ids: frozenset[int]
    special_tokens: Mapping[str, int]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    strips_space: bool = False
    chat_bos_id: int | None = None
    max_token_chars: int | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer keys of one GGUF file. `kinds[i]` is a token type as the file numbers them."""

    source: str
    pieces: Sequence[str]
    kinds: Sequence[int]
    special_ids: Mapping[str, int]
    metadata: Mapping[str, Any]

    def fail(self, message: str) -> FormatError:
        """An error that names the file."""
        return FormatError(f"{self.source}: {message}")

    def ids_of(self, *kinds: int) -> list[int]:
        """Ids whose type is one of `kinds`, ascending; tokens without text are left out."""
        return [i for i, kind in enumerate(self.kinds) if kind in kinds and self.pieces[i]]

    def flag(self, name: str, default: bool) -> bool:
        """A bool key under tokenizer.ggml."""
        value = self.metadata.get(_PREFIX + name, default)
        if not isinstance(value, bool):
            raise self.fail(f"{_PREFIX}{name} is {value!r}; it must be a bool")
        return value

    def text(self, name: str) -> str | None:
        """A string key under tokenizer.ggml; None when it is missing."""
        value = self.metadata.get(_PREFIX + name)
        if value is not None and not isinstance(value, str):
            raise self.fail(f"{_PREFIX}{name} is {value!r}; it must be a string")
        return value


def read_vocabulary(checkpoint: Checkpoint) -> Vocabulary:
    """Tokens, types and special ids of a GGUF file.

    **Raises** `FormatError` for lists of unequal length, unknown types, repeated or over-long
    tokens, and ids outside the vocabulary.
    """
    metadata, source = checkpoint.metadata, checkpoint.path
    pieces = _strings(metadata, "tokens", source, MAX_TOKENS)
    kinds = _numbers(metadata, "token_type", source, len(pieces))
    vocabulary = Vocabulary(source, pieces, kinds, {}, metadata)
    if not pieces:
        raise vocabulary.fail("tokenizer.ggml.tokens is empty")
    _check_pieces(vocabulary)
    specials = {name: _special_id(vocabulary, name) for name in _SPECIAL_NAMES}
    found = {name: token_id for name, token_id in specials.items() if token_id is not None}
    return _mark_control(replace(vocabulary, special_ids=found))


_SPECIAL_NAMES = ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask")


def _strings(metadata: Mapping[str, Any], name: str, source: str, limit: int) -> list[str]:
    values = metadata.get(_PREFIX + name)
    if not isinstance(values, list | tuple) or not set(map(type, values)) <= {str}:
        raise FormatError(f"{source}: {_PREFIX}{name} must be a list of strings")
    if len(values) > limit:
        raise FormatError(
            f"{source}: {_PREFIX}{name} has {len(values)} entries; at most {limit} are allowed"
        )
    return list(values)


def _numbers(metadata: Mapping[str, Any], name: str, source: str, count: int) -> list[Any]:
    values: Any = metadata.get(_PREFIX + name)
    values = values.tolist() if hasattr(values, "tolist") else values  # numpy arrays
    if not isinstance(values, list | tuple) or not set(map(type, values)) <= {int, float}:
        raise FormatError(f"{source}: {_PREFIX}{name} must be a list of numbers")
    if len(values) != count:
        raise FormatError(f"{source}: {_PREFIX}{name} has {len(values)} entries for {count} tokens")
    return list(values)


def _check_pieces(vocabulary: Vocabulary) -> None:
    kinds = set(vocabulary.kinds)
    if not kinds <= {NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE}:
        raise vocabulary.fail(f"token types {sorted(kinds)} are not all between 1 and 6")
    longest = max(map(len, vocabulary.pieces))
    if longest > MAX_PIECE_CHARS:
        raise vocabulary.fail(
            f"a token has {longest} characters; at most {MAX_PIECE_CHARS} are allowed"
        )
    texts = [piece for piece in vocabulary.pieces if piece]
    if len(set(texts)) != len(texts):
        seen: dict[str, int] = {}
        for i, piece in enumerate(vocabulary.pieces):
            if piece and seen.setdefault(piece, i) != i:
                raise vocabulary.fail(f"tokens {seen[piece]} and {i} are both {piece[:80]!r}")


def _special_id(vocabulary: Vocabulary, name: str) -> int | None:
    key = f"{_PREFIX}{name}_token_id"
    value = vocabulary.metadata.get(key)
    if value is None:
        return None
    size = len(vocabulary.pieces)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < size:
        raise vocabulary.fail(f"{key} is {value!r}; it must be between 0 and {size - 1}")
    return value


def _mark_control(vocabulary: Vocabulary) -> Vocabulary:
    """Give the type CONTROL to end-of-turn texts and to declared special ids in <angle brackets>,
    whatever type the file gives them."""
    kinds = list(vocabulary.kinds)
    declared = vocabulary.special_ids
    ids = {declared[name] for name in ("bos", "eos", "eot", "eom") if name in declared}
    ids = {i for i in ids if re.fullmatch(r"[<\[].+[>\]]", vocabulary.pieces[i])}
    wanted = set(END_TEXTS)
    ids.update(i for i, piece in enumerate(vocabulary.pieces) if piece in wanted)
    for token_id in ids:
        if kinds[token_id] != UNKNOWN:
            kinds[token_id] = CONTROL
    return replace(vocabulary, kinds=kinds)


def scores(vocabulary: Vocabulary) -> list[float]:
    """tokenizer.ggml.scores: one finite 32-bit number per token."""
    values = _numbers(vocabulary.metadata, "scores", vocabulary.source, len(vocabulary.pieces))
    if not all(map(math.isfinite, values)) or max(map(abs, values), default=0) > _MAX_SCORE:
        raise vocabulary.fail("tokenizer.ggml.scores holds numbers that are not finite floats")
    return [float(value) for value in values]


def merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """tokenizer.ggml.merges: pairs of known tokens whose union is a known token, best first."""
    known = set(vocabulary.pieces)
    pairs: list[tuple[str, str]] = []
    for line in _strings(vocabulary.metadata, "merges", vocabulary.source, MAX_MERGES):
        left, separator, right = line.partition(" ")
        is_pair = bool(left and separator and right) and " " not in right
        if not is_pair or not {left, right, left + right} <= known:
            raise vocabulary.fail(
                f"merge {line[:80]!r} is not two known tokens that make a third one"
            )
        pairs.append((left, right))
    return pairs


def byte_values(vocabulary: Vocabulary) -> dict[int, int]:
    """Id to byte value of the byte tokens, each written exactly <0xNN>, none twice."""
    values: dict[int, int] = {}
    for token_id in vocabulary.ids_of(BYTE):
        match = _BYTE_PIECE.fullmatch(vocabulary.pieces[token_id])
        if match is None:
            piece = vocabulary.pieces[token_id]
            raise vocabulary.fail(f"byte token {token_id} is {piece[:80]!r}, not <0x00> to <0xFF>")
        values[token_id] = int(match[1], 16)
    return values


def token_table(
    vocabulary: Vocabulary, *, add_bos: bool, strips_space: bool, drops_text: bool = False
) -> TokenTable:
    """The table of a GGUF vocabulary; `add_bos` is what its kind of tokenizer does by default,
    `drops_text` that a token may stand for any amount of text."""
    ids = vocabulary.special_ids
    bos, eos = ids.get("bos"), ids.get("eos")
    wants_bos = vocabulary.flag("add_bos_token", add_bos and bos is not None)
    wants_eos = vocabulary.flag("add_eos_token", False)
    for wanted, token_id, name in ((wants_bos, bos, "bos"), (wants_eos, eos, "eos")):
        if wanted and token_id is None:
            raise vocabulary.fail(f"add_{name}_token is set but there is no {name}_token_id")
    control = vocabulary.ids_of(CONTROL, UNKNOWN)
    texts = {vocabulary.pieces[i]: i for i in control}
    declared = [ids[name] for name in ("eos", "eot", "eom") if name in ids]
    return TokenTable(
        size=len(vocabulary.pieces),
        control_ids=frozenset(control),
        special_tokens=texts,
        bos_id=bos,
        eos_ids=end_ids(declared, texts),
        prefix_ids=(bos,) if wants_bos and bos is not None else (),
        suffix_ids=(eos,) if wants_eos and eos is not None else (),
        strips_space=strips_space,
        chat_bos_id=bos if wants_bos else None,
        max_token_chars=None if drops_text else max(map(len, vocabulary.pieces), default=None),
    )


def end_ids(declared: Iterable[int], special_tokens: Mapping[str, int]) -> tuple[int, ...]:
    """Declared end ids first, then those of the well-known end texts, none twice.

    Where <|return|> and <|call|> exist (harmony), <|end|> only separates messages.
    """
    texts = [text for text in END_TEXTS if text in special_tokens]
    if "<|return|>" in texts and "<|call|>" in texts:
        texts = [text for text in texts if text != "<|end|>"]
    return tuple(dict.fromkeys([*declared, *(special_tokens[text] for text in texts)]))
