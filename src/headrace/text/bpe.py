"""Byte-level byte-pair encoding for GGUF vocabularies of model "gpt2".

The merging is the `tokenizers` library's; this file gives it the vocabulary, the merges and the
cuts named by `tokenizer.ggml.pre`. Control tokens are left out of what the merger knows, so that
ordinary text can never come out as one, whatever it spells.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from headrace.errors import InvalidRequest
from headrace.text.bytelevel import BYTE_OF_CHAR, piece_bytes
from headrace.text.pretokenize import (
    PRE_TOKENIZERS,
    PreTokenizer,
    group_digits,
    pre_tokenizer,
)
from headrace.text.splitter import Splitter
from headrace.text.vocabulary import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    TokenTable,
    Vocabulary,
    merges,
    token_table,
)


class BpeCodec:
    """A `Codec` over `tokenizers.models.BPE`; `rules` say where words are cut."""

    def __init__(self, vocabulary: Vocabulary, rules: PreTokenizer) -> None:
        self._pieces = vocabulary.pieces
        self._user_defined = frozenset(vocabulary.ids_of(USER_DEFINED))
        plain = {vocabulary.pieces[i]: i for i in self._user_defined}
        control = {vocabulary.pieces[i]: i for i in vocabulary.ids_of(CONTROL, UNKNOWN)}
        self._plain = Splitter(plain)
        self._special = Splitter(plain | control)
        self._merger = _merger(vocabulary, rules)
        self._groups_digits = rules.groups_digits
        self._missing = _missing_bytes(vocabulary)

    def encode(self, text: str, *, parse_special: bool, sentinel: str = "") -> list[int]:
        ids: list[int] = []
        for part in (self._special if parse_special else self._plain).split(text):
            if isinstance(part, int):
                ids.append(part)
            elif sentinel and sentinel in part:
                whole = part.replace(sentinel, "")
                ids += self.encode(whole, parse_special=False)
            else:
                ids += self._encode_ordinary(part)
        return ids

    def _encode_ordinary(self, text: str) -> list[int]:
        if self._missing and not self._missing.isdisjoint(text.encode("utf-8")):
            char = next(c for c in text if not self._missing.isdisjoint(c.encode("utf-8")))
            raise InvalidRequest(f"the model's vocabulary has no tokens to write {char!r} with")
        parts = list(group_digits(text)) if self._groups_digits else [text]
        # Not `encode`, which holds the interpreter lock: a long text would stop every stream.
        encodings = self._merger.encode_batch_fast(parts, add_special_tokens=False)
        return [i for encoding in encodings for i in encoding.ids]

    def token_bytes(self, token_id: int) -> bytes:
        piece = self._pieces[token_id]
        return piece.encode("utf-8") if token_id in self._user_defined else piece_bytes(piece)

    def token_text(self, token_id: int) -> str:
        return self._pieces[token_id]


def load_bpe(vocabulary: Vocabulary) -> tuple[BpeCodec, TokenTable]:
    """Codec and table of a vocabulary of model "gpt2".

    **Raises** `UnsupportedModel` for an unknown or missing `pre`; `FormatError` for bad merges.
    """
    name = vocabulary.text("pre")
    if name is None:
        raise vocabulary.fail(
            "tokenizer.ggml.pre is missing, so where words are cut is not known and a guess would "
            "change the tokens silently. Convert the model again with a current converter, or "
            f"set the key to one of: {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    rules = pre_tokenizer(name, vocabulary.source)
    table = token_table(vocabulary, add_bos=rules.add_bos, strips_space=False)
    return BpeCodec(vocabulary, rules), table


def _merger(vocabulary: Vocabulary, rules: PreTokenizer) -> Tokenizer:
    ids = {vocabulary.pieces[i]: i for i in vocabulary.ids_of(NORMAL, USER_DEFINED)}
    pairs = [pair for pair in merges(vocabulary) if _is_inside(pair, ids)]
    merger = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=rules.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(text), behavior="isolated") for text in rules.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merger.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    return merger


def _missing_bytes(vocabulary: Vocabulary) -> frozenset[int]:
    """Bytes that no token writes; usually none. The merger would drop them without a word."""
    known = set(vocabulary.pieces)
    return frozenset(byte for char, byte in BYTE_OF_CHAR.items() if char not in known)


def _is_inside(pair: tuple[str, str], ids: dict[str, int]) -> bool:
    left, right = pair
    return left in ids and right in ids and left + right in ids
