"""Makes `goldens/*.json`: what two other implementations make of the awkward strings.

Not a test. llama.cpp (llama-cpp-python, vocabulary only) and the Hugging Face tokenizer that
transformers rebuilds from the same GGUF file, each with the text of special tokens left as text
and parsed. The second reference is stored only where it differs from the first. Needs torch,
transformers, gguf and llama-cpp-python, which the tests do not:

    python tests/text/make_goldens.py smollm2=FILE.gguf gemma3=FILE.gguf
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llama_cpp
from awkward import awkward_strings
from transformers import AutoTokenizer

Encode = Callable[[str, bool], list[int]]
PACKAGES = ("llama-cpp-python", "transformers", "tokenizers", "gguf")
FOLDER = Path(__file__).parent / "goldens"


def strings_digest(strings: list[str]) -> str:
    """Ties a golden file to the strings it was made from."""
    return hashlib.sha256(json.dumps(strings).encode()).hexdigest()


def llama_encoder(path: Path) -> Encode:
    """Token ids by llama.cpp, nothing added at the ends."""
    model = llama_cpp.Llama(model_path=str(path), vocab_only=True, verbose=False)

    def encode(text: str, parse_special: bool) -> list[int]:
        ids: list[int] = model.tokenize(text.encode(), add_bos=False, special=parse_special)
        return ids

    return encode


def hugging_face_encoder(path: Path) -> Encode:
    """Token ids by the tokenizer that transformers rebuilds from the file."""
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)

    def encode(text: str, parse_special: bool) -> list[int]:
        ids: list[int] = tokenizer.encode(
            text, add_special_tokens=False, split_special_tokens=not parse_special
        )
        return ids

    return encode


def compare(strings: list[str], parse_special: bool, llama: Encode, other: Encode) -> Any:
    """Ids of each string, and the second reference's by index where it disagrees."""
    ids = [llama(text, parse_special) for text in strings]
    others = [other(text, parse_special) for text in strings]
    differ = {str(i): b for i, (a, b) in enumerate(zip(ids, others, strict=True)) if a != b}
    for index in differ:
        print(f"  parse_special={parse_special}: differ on {index}: {strings[int(index)]!r:.70}")
    return {"llama_cpp": ids, "hugging_face_differs": differ}


def write(name: str, path: Path) -> None:
    """One golden file, a line per string."""
    strings = awkward_strings()
    llama, other = llama_encoder(path), hugging_face_encoder(path)
    print(f"{name}: {len(strings)} strings")
    golden = {
        "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "strings_sha256": strings_digest(strings),
        "versions": {package: version(package) for package in PACKAGES},
        "literal": compare(strings, False, llama, other),
        "parsed": compare(strings, True, llama, other),
    }
    text = json.dumps(golden, indent=0, separators=(",", ":"))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(_join_numbers(text) + "\n")


def _join_numbers(text: str) -> str:
    """A list of ids on one line: `json` has no such layout."""
    lines: list[str] = []
    for line in text.splitlines():
        is_number = line.rstrip(",").lstrip("-").isdigit()
        if is_number or (line in ("]", "],") and lines and lines[-1][-1].isdigit()):
            lines[-1] += line
        else:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        model_name, _, file = argument.partition("=")
        write(model_name, Path(file))
