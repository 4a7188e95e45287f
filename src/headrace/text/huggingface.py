"""Tokenizers of Hugging Face folders: tokenizer.json through the `tokenizers` library.

tokenizer.json says how to encode; tokenizer_config.json, generation_config.json and config.json
say which ids begin and end a text. Decoding is done here, token by token, because the library's
decoders see whole sequences only; one that is neither byte-level nor SentencePiece-like is refused.
Source: `tokenizers` 0.21+ file format; semantics follow transformers' fast tokenizers.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

from headrace.errors import FormatError, UnsupportedModel
from headrace.text.bytelevel import piece_bytes
from headrace.text.splitter import Splitter
from headrace.text.vocabulary import TokenTable, end_ids
from headrace.types import Checkpoint

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class HuggingFaceCodec:
    """A `Codec` over a whole `tokenizers.Tokenizer`, added tokens and normaliser included."""

    def __init__(
        self, inner: Tokenizer, added: Mapping[int, AddedToken], *, is_byte_level: bool
    ) -> None:
        self._inner = inner
        self._added = added
        self._is_byte_level = is_byte_level
        control = {token.content: i for i, token in added.items() if token.special}
        self._control_ids = frozenset(control.values())
        self._splitter = Splitter(control)
        self._lock = threading.Lock()  # encode_special_tokens is state of the library's object
        # Batches of one below: `encode` holds the interpreter lock, and a long text would stop
        # every stream of a server.

    def encode(self, text: str, *, parse_special: bool, sentinel: str = "") -> list[int]:
        if not sentinel or sentinel not in text:
            return self._parse(text) if parse_special else self._encode_plain(text)
        ids: list[int] = []
        for part in self._splitter.split(text):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._encode_plain(part.replace(sentinel, ""))
        return ids

    def _parse(self, text: str) -> list[int]:
        with self._lock:
            self._inner.encode_special_tokens = False
            return list(self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def _encode_plain(self, text: str) -> list[int]:
        """Ids without control tokens. Where a word equals one, it is cut after its first
        character, so that it is spelt out instead."""
        with self._lock:
            self._inner.encode_special_tokens = True
            encoding = self._inner.encode_batch([text], add_special_tokens=False)[0]
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._control_ids and end - start > 1:
                cut = start + 1
                return self._encode_plain(text[:cut]) + self._encode_plain(text[cut:])
        return [i for i in encoding.ids if i not in self._control_ids]

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode("utf-8")
        piece = self.token_text(token_id)
        if self._is_byte_level:
            return piece_bytes(piece)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace(_SPACE, " ").encode("utf-8")

    def token_text(self, token_id: int) -> str:
        piece = self._inner.id_to_token(token_id)
        return "" if piece is None else str(piece)  # ids may have holes


def load_huggingface(checkpoint: Checkpoint) -> tuple[HuggingFaceCodec, TokenTable]:
    """Codec and table of a model folder.

    **Raises** `UnsupportedModel` when the folder has no tokenizer.json or its kind is not known,
    `FormatError` when it cannot be read.
    """
    data = checkpoint.metadata.get("tokenizer_json")
    if data is None:
        raise UnsupportedModel(
            f"{checkpoint.path}: there is no tokenizer.json. A folder with only tokenizer.model or "
            "vocab.txt must be converted once: transformers' "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes the file"
        )
    if not isinstance(data, Mapping):
        raise FormatError(f"{checkpoint.path}: tokenizer.json is not an object")
    inner = _open(data, checkpoint.path)
    added = dict(inner.get_added_tokens_decoder())
    is_byte_level = _is_byte_level(data, checkpoint.path)
    codec = HuggingFaceCodec(inner, added, is_byte_level=is_byte_level)
    return codec, _table(checkpoint, inner, added, data)


def _open(data: Mapping[str, Any], source: str) -> Tokenizer:
    _check_model(data, source)
    try:
        inner = Tokenizer.from_str(json.dumps(data, ensure_ascii=False))
    except BaseException as error:  # bare Exception for what is wrong, a Rust panic for its bugs
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FormatError(f"{source}: tokenizer.json cannot be read ({error})") from None
    inner.no_truncation()
    inner.no_padding()
    return inner


def _check_model(data: Mapping[str, Any], source: str) -> None:
    """Refuses what the library does not survive: it cuts `continuing_subword_prefix` off the
    bytes of every merge without looking, and goes on with text that is no text."""
    model = data.get("model")
    if not isinstance(model, Mapping):
        raise FormatError(f"{source}: tokenizer.json cannot be read (it has no model)")
    prefix = model.get("continuing_subword_prefix")
    if model.get("merges") is not None and prefix not in (None, ""):
        raise UnsupportedModel(
            f"{source}: tokenizer.json has merges with continuing_subword_prefix {prefix!r}, which "
            "is not supported; byte-level and SentencePiece-like vocabularies have none"
        )


def _decoder_steps(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The decoders of tokenizer.json, sequences flattened (they do not nest deeper in practice)."""
    decoder = data.get("decoder")
    if isinstance(decoder, Mapping):
        inside = decoder.get("decoders")
        steps = inside if isinstance(inside, list) else [decoder]
        yield from (step for step in steps if isinstance(step, Mapping))


def _is_byte_level(data: Mapping[str, Any], source: str) -> bool:
    types = [str(step.get("type")) for step in _decoder_steps(data)]
    if "ByteLevel" in types:
        return True
    if {"ByteFallback", "Metaspace"} & set(types):
        return False
    raise UnsupportedModel(
        f"{source}: tokenizer.json decodes with {', '.join(types) or 'nothing'}; known are "
        "ByteLevel, ByteFallback and Metaspace"
    )


def _strips_space(data: Mapping[str, Any]) -> bool:
    for step in _decoder_steps(data):
        if step.get("type") == "Strip":
            return bool(step.get("content") == " " and step.get("start"))
        if step.get("type") == "Metaspace":
            return bool(step.get("prepend_scheme", "always") != "never")
    return False


def _table(
    checkpoint: Checkpoint,
    inner: Tokenizer,
    added: Mapping[int, AddedToken],
    data: Mapping[str, Any],
) -> TokenTable:
    config = _mapping(checkpoint, "tokenizer_config")
    control = {token.content: i for i, token in added.items() if token.special}
    bos = _token_id(config.get("bos_token"), inner, checkpoint.path, "bos_token")
    prefix, suffix = _surroundings(inner)
    if config.get("add_bos_token") is False and bos is not None:
        prefix = tuple(i for i in prefix if i != bos)
    if config.get("add_bos_token") is True and bos is not None and bos not in prefix:
        prefix = (bos, *prefix)
    declared = _declared_ends(checkpoint, config, inner)
    size = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
    for token_id in declared:
        if not 0 <= token_id < size:
            raise FormatError(f"{checkpoint.path}: eos_token_id {token_id} is not below {size}")
    return TokenTable(
        size=size,
        control_ids=frozenset(control.values()),
        special_tokens=control,
        bos_id=bos,
        eos_ids=end_ids(declared, control),
        prefix_ids=prefix,
        suffix_ids=suffix,
        strips_space=_strips_space(data),
    )


def _surroundings(inner: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the file's post-processor puts before and behind a text, seen on a short one."""
    bare = inner.encode("a", add_special_tokens=False).ids
    full = inner.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if bare and full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


def _declared_ends(
    checkpoint: Checkpoint, config: Mapping[str, Any], inner: Tokenizer
) -> list[int]:
    generation = _mapping(checkpoint, "generation_config")
    ids: list[int] = []
    eos = _token_id(config.get("eos_token"), inner, checkpoint.path, "eos_token")
    if eos is not None:
        ids.append(eos)
    for value in (generation.get("eos_token_id"), checkpoint.metadata.get("eos_token_id")):
        values = value if isinstance(value, list) else [value]
        if not all(v is None or type(v) is int for v in values):
            raise FormatError(
                f"{checkpoint.path}: eos_token_id is {value!r}; it must be a number or a list"
            )
        ids += [v for v in values if v is not None]
    return ids


def _mapping(checkpoint: Checkpoint, key: str) -> Mapping[str, Any]:
    value = checkpoint.metadata.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise FormatError(f"{checkpoint.path}: {key} is not an object")
    return value


def _token_id(value: object, inner: Tokenizer, source: str, name: str) -> int | None:
    """The id of a token named in tokenizer_config.json, as text or as an object."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if text is None:
        return None
    token_id = inner.token_to_id(text) if isinstance(text, str) else None
    if token_id is None:
        raise FormatError(f"{source}: {name} is {text!r}, which is not in tokenizer.json")
    return int(token_id)
