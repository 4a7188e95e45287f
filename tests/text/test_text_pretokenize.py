"""Cuts of each `pre` name: against the tokenizers library's own, and by hand.

The library's ByteLevel and Digits pre-tokenizers are written in Rust with another regular
expression engine, so they are an independent reading of the same rules.
"""

from __future__ import annotations

import pytest
from awkward import awkward_strings
from tokenizers import Regex, pre_tokenizers

from headrace.text.pretokenize import PRE_TOKENIZERS, group_digits

NAMES_OF_THE_FORMAT = """
default llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano
deepseek-llm deepseek-coder deepseek-v3 falcon mpt starcoder gpt-2 phi-2 jina-es jina-de
jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert mellum2 jais jais-2 jina-v1-en
jina-v2-code roberta-bpe refact command-r cohere2_moe qwen2 deepseek-r1-qwen kormo openpangu
qwen35 stablelm2 olmo dbrx smaug-bpe poro-chat glm4 chatglm-bpe viking tekken smollm codeshell
bloom gpt3-finnish exaone exaone4 exaone-moe chameleon minerva-7b megrez gpt-4o llama4 kanana2
tiny_aya trillion granite-docling bailingmoe bailingmoe2 llada-moe seed-coder hunyuan
hunyuan-dense joyai-llm kimi-k2 grok-2 minimax-m2 solar-open
"""


def words(name: str, text: str) -> list[str]:
    """`text` cut by the rules of a `pre` name."""
    rules = PRE_TOKENIZERS[name]
    steps = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in rules.patterns]
    cutter = pre_tokenizers.Sequence(steps)
    parts = group_digits(text) if rules.groups_digits else (text,)
    return [word for part in parts for word, _ in cutter.pre_tokenize_str(part)]


def library_words(text: str, *, is_digit_alone: bool) -> list[str]:
    """`text` cut by the library's own GPT-2 rules."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    cutter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    both = pre_tokenizers.Sequence([digits, cutter]) if is_digit_alone else cutter
    cuts = both.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in cuts]


def test_every_name_is_known_but_those_refused_on_purpose() -> None:
    assert sorted(PRE_TOKENIZERS) == sorted(NAMES_OF_THE_FORMAT.split())


@pytest.mark.parametrize("text", awkward_strings())
def test_gpt2_and_smollm_cut_as_the_library_does(text: str) -> None:
    assert words("gpt-2", text) == library_words(text, is_digit_alone=False)
    assert words("smollm", text) == library_words(text, is_digit_alone=True)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_cuts_lose_nothing(name: str) -> None:
    for text in awkward_strings():
        assert "".join(words(name, text)) == text


GROUPED = [
    *awkward_strings(),
    *(
        "1" * length + tail
        for length in range(1, 12)
        for tail in ("", "a", "_", " ", "é", "٣", "½")
    ),
    *("x" + "1" * length + "\u0301" for length in range(1, 8)),
]


@pytest.mark.parametrize("text", GROUPED)
def test_numbers_are_grouped_as_the_published_expression_does(text: str) -> None:
    expression = Regex(r"\d{1,3}(?=(?:\d{3})*\b)")
    cutter = pre_tokenizers.Split(expression, behavior="isolated")
    expected = [word for word, _ in cutter.pre_tokenize_str(text)]
    assert list(group_digits(text)) == expected


BY_HAND = [
    # Llama 3: up to three digits from the left, contractions in any case, a mark joins a word.
    ("llama-bpe", "I'LL pay $1234567", ["I", "'LL", " pay", " $", "123", "456", "7"]),
    ("llama-bpe", "a\n\n  b", ["a", "\n\n", " ", " b"]),
    ("llama-bpe", "(word) x=1", ["(word", ")", " x", "=", "1"]),
    # Qwen 2: each digit alone.
    ("qwen2", "x 123\n", ["x", " ", "1", "2", "3", "\n"]),
    # Qwen 3.5: combining marks stay with their letters, in Qwen 2 they do not.
    ("qwen35", "e\u0301a", ["e\u0301a"]),
    ("qwen2", "e\u0301a", ["e", "\u0301a"]),
    # GPT-4o: a change from lower to upper case starts a word; the contraction stays with it.
    ("gpt-4o", "camelCase I'm", ["camel", "Case", " I'm"]),
    ("gpt-4o", "HTTPServer", ["HTTPServer"]),
    ("gpt-4o", "a//\n/b", ["a", "//\n/", "b"]),
    # Tekken: the same without contractions, digits alone.
    ("tekken", "I'm 42", ["I", "'m", " ", "4", "2"]),
    # DeepSeek V3: Chinese apart from other letters, three digits.
    ("deepseek-v3", "abc你好1234", ["abc", "你好", "123", "4"]),
    ("deepseek-llm", "x 你好 12!\n\n", ["x", " ", "你好", " ", "12", "!", "\n", "\n"]),
    ("deepseek-coder", "ab 12", ["ab", " ", "1", "2"]),
    # Command A: digits in threes from the right.
    ("tiny_aya", "1234567", ["1", "234", "567"]),
    # Falcon: punctuation apart, digits in threes from the left.
    ("falcon", "a, b12345", ["a", ",", " b", "123", "45"]),
    # Kimi: Chinese apart from other letters.
    ("kimi-k2", "abc你好Word", ["abc", "你好", "Word"]),
    # BLOOM: words end at punctuation only.
    ("bloom", "it's 42, ok", ["it's", " 42", ",", " ok"]),
    # Chameleon: pairs of spaces.
    ("chameleon", "a     b", ["a", "    ", " b"]),
    # Jais 2: runs of spaces in powers of two.
    ("jais-2", "a" + " " * 13 + "b", ["a", " " * 8, " " * 4, " b"]),
]


@pytest.mark.parametrize(("name", "text", "expected"), BY_HAND)
def test_cuts_by_hand(name: str, text: str, expected: list[str]) -> None:
    assert words(name, text) == expected
