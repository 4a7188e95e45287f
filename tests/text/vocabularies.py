"""Small vocabularies for the text tests, as GGUF metadata, with the models they were taken from.

Not a test. Each is trained in a moment on a fixed text by the library that owns the format
(`tokenizers`, `sentencepiece`), so that the trained model itself says what our reading of its
pieces must give.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.types import Checkpoint

CORPUS = (
    "The channel that feeds a mill wheel is called a headrace. It's bound by the channel, not by "
    "the wheel; the wheel's 12 buckets won't turn faster than 3,450 litres.\n\n"
    "def wheel(x):\n    return x + 1  # don't\n\n"
    "Das Wasser läuft über das Rad. 水は溝を流れる。 Колесо крутится. 🙂🙂\n"
) * 4
RUNS = ("<tool>", "▁▁", "▁▁▁▁", "\n")  # user-defined pieces of the vocabulary without prefix
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def gguf(**keys: Any) -> Checkpoint:
    """A GGUF checkpoint of tokenizer keys alone."""
    metadata = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return Checkpoint("test.gguf", "gguf", metadata, {})


def changed(checkpoint: Checkpoint, **keys: Any) -> Checkpoint:
    """The same with other keys; None removes one."""
    new = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    merged = {k: v for k, v in (dict(checkpoint.metadata) | new).items() if v is not None}
    return Checkpoint(checkpoint.path, checkpoint.dialect, merged, {})


@cache
def trained_bpe() -> Tokenizer:
    """A byte-level BPE as GPT-2's, with three control tokens and one user-defined one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def bpe_checkpoint(pre: str = "gpt-2") -> Checkpoint:
    """`trained_bpe` as GGUF keys; the model's merges come from its own JSON."""
    tokenizer = trained_bpe()
    by_id = {i: piece for piece, i in tokenizer.get_vocab().items()}
    pieces = [by_id[i] for i in range(len(by_id))]
    kinds = [3 if piece in CONTROL else 4 if piece == "<tool>" else 1 for piece in pieces]
    return gguf(
        model="gpt2",
        pre=pre,
        tokens=pieces,
        token_type=kinds,
        merges=[" ".join(pair) for pair in bpe_json()["model"]["merges"]],
        bos_token_id=1,
        eos_token_id=2,
        add_bos_token=False,
    )


@cache
def bpe_json() -> Mapping[str, Any]:
    """`trained_bpe` as the content of its tokenizer.json."""
    content: Mapping[str, Any] = json.loads(trained_bpe().to_str())
    return content


@cache
def trained_spm(add_dummy_prefix: bool = True) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece BPE with byte fallback, as Llama's or (no prefix, user-defined runs of white
    space) Gemma's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS.split("\n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        add_dummy_prefix=add_dummy_prefix,
        remove_extra_whitespaces=False,
        control_symbols=["<|im_end|>"],
        user_defined_symbols=["<tool>"] if add_dummy_prefix else list(RUNS),
        minloglevel=2,
        num_threads=1,
    )
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.getvalue())
    return processor


def spm_checkpoint(add_dummy_prefix: bool = True) -> Checkpoint:
    """`trained_spm` as GGUF keys; converters write user-defined pieces with plain spaces."""
    model = trained_spm(add_dummy_prefix)
    ids = range(model.get_piece_size())
    pieces = [model.id_to_piece(i) for i in ids]
    kinds = [_kind(model, i) for i in ids]
    written = [
        piece.replace("\u2581", " ") if kind == 4 else piece
        for piece, kind in zip(pieces, kinds, strict=True)
    ]
    return gguf(
        model="llama",
        tokens=written,
        token_type=kinds,
        scores=[model.get_score(i) for i in ids],
        bos_token_id=model.bos_id(),
        eos_token_id=model.eos_id(),
        unknown_token_id=model.unk_id(),
        add_space_prefix=add_dummy_prefix,
    )


def _kind(model: sentencepiece.SentencePieceProcessor, token_id: int) -> int:
    if model.is_unknown(token_id):
        return 2
    if model.is_control(token_id):
        return 3
    if model.is_byte(token_id):
        return 6
    return 4 if model.id_to_piece(token_id) in RUNS else 1
