"""Token ids of two real models on two hundred awkward strings, against two other implementations.

The expected ids come from llama.cpp and from transformers (`make_goldens.py`; versions in the
files). Where those two disagree with each other the string is listed below with the reason, and
the ids must equal llama.cpp's, but for one string; a new disagreement cannot slip in unread.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from awkward import awkward_strings

from headrace.formats.checkpoint import open_checkpoint
from headrace.text.tokenizer import Tokenizer, load_tokenizer

CATALOGUE = {"smollm2": "smollm2:135m", "gemma3": "gemma3:270m"}

# The tokenizer that transformers rebuilds from a GGUF file is not the model's published one:
# - smollm2: it lacks the step that isolates digits before the words are split, so a space stays
#   with a following digit of another script (no ASCII digits are merged, so they do not show it);
# - gemma3: runs of spaces, and a literal U+2581, are merged as words, where SentencePiece (and
#   llama.cpp) take the longest user-defined piece first, from the left;
# - gemma3, literal only: "</s>" is a user-defined piece in the file, not a control token; llama.cpp
#   overrides its type because the text looks like an end mark. Here we keep to the file.
DISAGREEMENTS = {
    ("smollm2", "literal"): {64, 175},
    ("smollm2", "parsed"): {64, 175},
    ("gemma3", "literal"): {116, 117, 127, 133},
    ("gemma3", "parsed"): {116, 117, 127},
}
AS_HUGGING_FACE = {("gemma3", "literal"): {133}}


def load_golden(name: str) -> dict[str, Any]:
    """A golden file, checked to be of today's strings."""
    path = Path(__file__).parent / "goldens" / f"{name}.json"
    golden: dict[str, Any] = json.loads(path.read_text())
    digest = hashlib.sha256(json.dumps(awkward_strings()).encode()).hexdigest()
    assert golden["strings_sha256"] == digest, "awkward.py changed: run make_goldens.py again"
    return golden


def expected_ids(name: str, mode: str) -> list[list[int]]:
    """llama.cpp's ids, but for the strings of `AS_HUGGING_FACE`."""
    golden = load_golden(name)[mode]
    ids: list[list[int]] = golden["llama_cpp"]
    for index in AS_HUGGING_FACE.get((name, mode), set()):
        ids[index] = golden["hugging_face_differs"][str(index)]
    return ids


@pytest.mark.parametrize("mode", ["literal", "parsed"])
@pytest.mark.parametrize("name", CATALOGUE)
def test_ids_equal_both_references(name: str, mode: str, model_path: Callable[[str], Path]) -> None:
    tokenizer = load_tokenizer(open_checkpoint(model_path(CATALOGUE[name])))
    strings = awkward_strings()
    wrong = {
        text: (ids, expected)
        for text, expected in zip(strings, expected_ids(name, mode), strict=True)
        if (ids := encode(tokenizer, text, mode)) != expected
    }
    assert not wrong, f"{len(wrong)} of {len(strings)} strings: {list(wrong.items())[:3]}"


@pytest.mark.parametrize(("name", "mode"), DISAGREEMENTS)
def test_references_disagree_only_where_explained(name: str, mode: str) -> None:
    differs = load_golden(name)[mode]["hugging_face_differs"]
    assert {int(index) for index in differs} == DISAGREEMENTS[name, mode]


def encode(tokenizer: Tokenizer, text: str, mode: str) -> list[int]:
    """Nothing added at the ends; special text parsed or not."""
    return tokenizer.encode(text, add_special=False, parse_special=mode == "parsed")
