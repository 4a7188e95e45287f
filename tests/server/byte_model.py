"""A served model whose tokens are bytes: the real tokenizer around a codec that does nothing."""

from __future__ import annotations

from fake_engine import EOS, VOCAB_SIZE

from headrace.service import ServedModel
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.text.vocabulary import TokenTable

TEMPLATE = "{{ greeting }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class ByteCodec:
    """Implements `vocabulary.Codec`."""

    def encode(self, text: str, *, parse_special: bool, sentinel: str = "") -> list[int]:
        return list((text.replace(sentinel, "") if sentinel else text).encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return "<eos>" if token_id == EOS else chr(token_id)


def byte_model(
    name: str = "bytes", max_context: int = 1000, *, has_template: bool = True
) -> ServedModel:
    """Ids 0 to 255 are bytes, `EOS` is control; one further id is padding."""
    table = TokenTable(
        size=VOCAB_SIZE,
        control_ids=frozenset({EOS}),
        special_tokens={"<eos>": EOS},
        bos_id=None,
        eos_ids=(EOS,),
        prefix_ids=(),
        suffix_ids=(),
        max_token_chars=len("<eos>"),
    )
    template = ChatTemplate(TEMPLATE) if has_template else None
    return ServedModel(name, Tokenizer(ByteCodec(), table), template, max_context, VOCAB_SIZE)
