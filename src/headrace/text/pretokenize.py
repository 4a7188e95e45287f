"""How text is cut into words before byte-pair merges: one entry per GGUF `tokenizer.ggml.pre`.

Data and a lookup, no tokenizer. A word never spans a cut, so a wrong entry changes ids silently;
therefore an unknown name is refused, and so are names whose rules we cannot state with confidence
(afmoe, gemma4, superbpe, youtu). Expressions are applied one after another, each to the pieces
the last one left. Source: the `pre_tokenizer` of each model's tokenizer.json, and llama.cpp's list
of names (October 2026).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headrace.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns` in Oniguruma syntax, in order. `ignore_merges`: a word that is itself a token is
    not merged up. `add_bos`: what a file that does not say means. `groups_digits`: numbers are cut
    by `group_digits` first."""

    patterns: tuple[str, ...]
    groups_digits: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|" + _SPACES
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_DIGIT = r"\p{N}"
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _gpt4_like(digits: str, marks: str = _MARKS, spaces: str = _LINES) -> str:
    return "|".join((_CONTRACTION, _LEAD + r"\p{L}+", digits, marks, spaces))


def _cased(suffix: str, digits: str, marks: str = _MARKS_SLASH) -> str:
    words = (_LEAD + _UPPER + "*" + _LOWER + "+", _LEAD + _UPPER + "+" + _LOWER + "*")
    return "|".join((*(word + suffix for word in words), digits, marks, _LINES))


_LLAMA3 = _gpt4_like(r"\p{N}{1,3}")
_QWEN2 = _gpt4_like(_DIGIT)
_GPT4O = _cased(_CONTRACTION + "?", r"\p{N}{1,3}")
_QWEN35 = "|".join(
    (
        _CONTRACTION,
        _LEAD + r"[\p{L}\p{M}]+",
        _DIGIT,
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        _LINES,
    )
)
_SEED_CODER = _gpt4_like(_DIGIT, r" ?[^\s\p{L}\p{N}\r\n]+")
_BAILING = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        _DIGIT,
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r"\s*[\r\n]",
        _SPACES,
    )
)
_EXAONE_MOE = "|".join(
    (
        _CONTRACTION,
        _LEAD + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
        _DIGIT,
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
        r"\s*[\r\n]",
        _SPACES,
    )
)
_JAIS2_SPACES = "|".join(
    (
        r"\s*[\r\n]+",
        *(rf"\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4)),
        r"\s{1,2}(?!\S)",
        r"\s{1}",
    )
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "|".join(
        (
            _ASCII_PUNCTUATION + "[A-Za-z]+",
            r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
            r" ?[\p{P}\p{S}]+[\r\n]*",
            _LINES,
        )
    ),
)
_DEEPSEEK_CJK = "[一-龥\u0800-一가-\ud7ff]+"
# Letters with case, as deepseek-llm lists them; look-alikes and edges as escapes.
_DEEPSEEK_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ"
    "Ḁ-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "ℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎ"
    "ꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_CASED}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
    r"\s+$",
    _DEEPSEEK_CJK,
    r"\p{N}+",
)
_KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}?",
        f"{_LEAD}{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}?",
        r"\p{N}{1,3}",
        _MARKS,
        _LINES,
    )
)

# Names that share a line share a tokenizer; order of patterns matters.
_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("jais-2", PreTokenizer((_gpt4_like(r"\p{N}{1,3}", spaces=_JAIS2_SPACES),))),
    ("deepseek-llm", PreTokenizer(_DEEPSEEK_LLM)),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT)),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer(_DEEPSEEK_V3)),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    (
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer((_DIGIT, _GPT2)),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert "
        "jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        PreTokenizer((_GPT2,)),
    ),
    (
        "qwen2 deepseek-r1-qwen kormo openpangu stablelm2 hunyuan solar-open megrez grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, _DIGIT))),
    ("tekken", PreTokenizer((_cased("", _DIGIT),), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 minimax-m2", PreTokenizer((_GPT4O,))),
    ("tiny_aya cohere2_moe", PreTokenizer((_GPT4O,), groups_digits=True)),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED_CODER,))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    (
        "chameleon",
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                _DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: rules for names, rules in _GROUPS for name in names.split()
}


def pre_tokenizer(name: str, source: str) -> PreTokenizer:
    """The rules of one `tokenizer.ggml.pre` name.

    **Raises** `UnsupportedModel` with the list of names, for any other.
    """
    rules = PRE_TOKENIZERS.get(name)
    if rules is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedModel(
            f"{source}: tokenizer.ggml.pre is {name!r}, which is not known; guessing would change "
            f"the tokens silently. Known: {known}"
        )
    return rules


def group_digits(text: str) -> Iterator[str]:
    r"""`text` with each whole number cut into threes from the right: 1 234 567.

    What the expression `\d{1,3}(?=(?:\d{3})*\b)` means; matching it takes time that grows with the
    square of a number's length, and a text may be one long number. A number that a letter or
    mark follows stays whole.
    """
    start = 0
    for match in re.finditer(r"\d+", text):
        if match.end() < len(text) and _is_word(text[match.end()]):
            continue
        if start < match.start():
            yield text[start : match.start()]
        start = match.start()
        while start < match.end():
            end = start + ((match.end() - start - 1) % 3 + 1)
            yield text[start:end]
            start = end
    if start < len(text):
        yield text[start:]


def _is_word(char: str) -> bool:
    r"""Whether Oniguruma's \w has the character (of other numbers, Latin-1's only)."""
    category = unicodedata.category(char)
    return category[0] in "LM" or category in ("Nd", "Nl", "Pc") or char in "²³¹¼½¾"
