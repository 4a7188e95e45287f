"""Text to token ids and back, for any model file that is known.

The door of the package: `load_tokenizer` picks the codec; `Tokenizer` adds what all share (bounds,
special tokens around a text, decoding). Text is `str`; bytes are not accepted, and a `str` that is
not Unicode (lone surrogates) is refused, since no tokenizer can represent it. Only a text encoded
with `parse_special=True` can give control tokens; with False, no text can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from headrace.errors import InvalidRequest, UnsupportedModel
from headrace.text.bpe import load_bpe
from headrace.text.huggingface import load_huggingface
from headrace.text.splitter import Breaker
from headrace.text.spm import load_spm
from headrace.text.vocabulary import Codec, TokenTable, read_vocabulary
from headrace.types import Checkpoint

_KNOWN_MODELS = ("gpt2 (byte-level BPE)", "llama (SentencePiece)")


class Tokenizer:
    """One model's tokenizer. Immutable; any thread may use it."""

    def __init__(self, codec: Codec, table: TokenTable) -> None:
        self._codec = codec
        self._table = table
        self.vocab_size: int = table.size
        self.bos_id: int | None = table.bos_id
        self.eos_ids: tuple[int, ...] = table.eos_ids
        self.add_bos: bool = table.bos_id is not None and table.bos_id in table.prefix_ids
        self.chat_bos_id: int | None = table.chat_bos_id
        self.strips_space: bool = table.strips_space
        self.breaker = Breaker(table.special_tokens)
        self.special_tokens: Mapping[str, int] = MappingProxyType(dict(table.special_tokens))

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of `text`.

        `add_special`: put the model's beginning (and end) tokens around it, as the file says;
        those the text already has at that place, by `parse_special`, are not added again.
        `parse_special`: the text of a control token becomes that token.

        **Raises** `InvalidRequest` when the text is not Unicode.
        """
        ids = self.encode_marked(text, "", parse_special=parse_special)
        if not add_special:
            return ids
        prefix, suffix = list(self._table.prefix_ids), list(self._table.suffix_ids)
        if prefix and ids[: len(prefix)] != prefix:
            ids = prefix + ids
        if suffix and ids[-len(suffix) :] != suffix:
            ids = ids + suffix
        return ids

    def encode_marked(self, text: str, sentinel: str, *, parse_special: bool = True) -> list[int]:
        """`encode` without additions, for text in which `sentinel` characters break up special
        tokens that must not be found; they are dropped before the rest is encoded."""
        check_text(text)
        return self._codec.encode(text, parse_special=parse_special, sentinel=sentinel)

    def least_tokens(self, text: str, sentinel: str = "") -> int:
        """A number of tokens that `encode_marked` cannot stay under; cheap, and often far under
        the real one. 0 when nothing is known."""
        longest = self._table.max_token_chars
        if not longest or not isinstance(text, str):
            return 0
        num_dropped = text.count(sentinel) if sentinel else 0
        return -(-(len(text) - num_dropped) // longest)

    def is_control(self, token_id: int) -> bool:
        """Whether the token is a mark (end of turn, ...), not text."""
        self._check(token_id)
        return token_id in self._table.control_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, not always whole characters; b"" for control tokens."""
        return b"" if self.is_control(token_id) else self._codec.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """The piece for display: as the vocabulary writes it, control tokens included."""
        self._check(token_id)
        return self._codec.token_text(token_id)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD.

        A SentencePiece vocabulary's added space at the very start is dropped. To decode a
        continuation, or token by token, use `detokenizer.Detokenizer`.
        """
        parts: list[bytes] = []
        is_start = self.strips_space
        for token_id in ids:
            if self.is_control(token_id):
                parts.append(b"" if skip_special else self.token_text(token_id).encode("utf-8"))
                continue
            part = self._codec.token_bytes(token_id)
            parts.append(part.removeprefix(b" ") if is_start else part)
            is_start = False
        return b"".join(parts).decode("utf-8", "replace")

    def _check(self, token_id: int) -> None:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequest(
                f"token id {token_id} is not in the vocabulary; ids are 0 to {self.vocab_size - 1}"
            )


def check_text(text: str) -> None:
    """**Raises** `InvalidRequest` unless `text` is a `str` of whole Unicode characters."""
    if not isinstance(text, str):
        raise InvalidRequest(
            f"text is {type(text).__name__}; it must be str (decode bytes as UTF-8 first)"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character "
            f"{error.start}; it is not valid Unicode. Send UTF-8, with surrogates in pairs"
        ) from None


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of an opened model.

    **Raises** `UnsupportedModel` for a kind that is not known, `FormatError` for a malformed one.
    """
    if checkpoint.dialect == "hf":
        return Tokenizer(*load_huggingface(checkpoint))
    model = checkpoint.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return Tokenizer(*load_bpe(read_vocabulary(checkpoint)))
    if model == "llama":
        return Tokenizer(*load_spm(read_vocabulary(checkpoint)))
    given = "missing" if model is None else repr(model)
    raise UnsupportedModel(
        f"{checkpoint.path}: tokenizer.ggml.model is {given}; known are {', '.join(_KNOWN_MODELS)}"
    )
