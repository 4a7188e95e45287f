"""The door: a path to a model file or folder becomes a `Checkpoint`, or an error that says why.

What a file is shows in its first bytes, not in its name. Pickle checkpoints are refused: loading
one runs whatever program its author put into it. Nothing is downloaded or converted here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import FormatError, ModelNotFound
from headrace.formats.gguf import open_gguf, shard_paths
from headrace.formats.json_files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, read_json
from headrace.formats.mapped import map_file
from headrace.formats.safetensors import INDEX_NAME, SINGLE_NAME, read_safetensors, read_sharded
from headrace.types import Checkpoint, StoredTensor

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_PICKLE_MAGIC = re.compile(rb"\x80[\x02-\x05]")
_PICKLE_ADVICE = (
    "is a pickle checkpoint; loading one can run any program hidden in it, so it is refused. "
    "Use the model's .safetensors or .gguf files, or convert it where you trust it"
)
# First bytes of what is often given by mistake.
_KNOWN_MISTAKES: Mapping[bytes, str] = {
    b"version https://git-lfs": "is a Git LFS pointer, not the file; run `git lfs pull`",
    b"<!DOCTYPE": "is a web page, not a model; download it again",
    b"<html": "is a web page, not a model; download it again",
    b"lmgg": "is a GGML file, older than GGUF; convert the model again",
    b"tjgg": "is a GGJT file, older than GGUF; convert the model again",
    b"fmgg": "is a GGMF file, older than GGUF; convert the model again",
    b"\x89HDF": "is an HDF5 file; only GGUF and safetensors are read",
}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file (or shard), a folder with one, or a Hugging Face folder.

    A folder with both safetensors and GGUF is read as a Hugging Face folder.

    **Raises** `ModelNotFound` when nothing is there, `FormatError` for everything that is there
    but cannot be used.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _open_folder(path)
        if not path.exists():
            raise ModelNotFound(f"{path}: there is no such file or folder")
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be opened ({error})") from None
    return _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    start = map_file(path)[:32].tobytes()
    if start.startswith(b"GGUF"):
        return open_gguf(path)
    _refuse_mistakes(path, start)
    if path.suffix == ".safetensors":
        raise FormatError(
            f"{path}: a safetensors file alone does not say what model it is; give the folder "
            "that holds it together with config.json and tokenizer.json"
        )
    raise FormatError(f"{path}: is neither GGUF nor a model folder (it starts with {start[:8]!r})")


def _refuse_mistakes(path: Path, start: bytes) -> None:
    is_pickle = _PICKLE_MAGIC.match(start) or start.startswith(b"PK\x03\x04")
    if is_pickle or path.suffix in PICKLE_SUFFIXES:
        raise FormatError(f"{path}: {_PICKLE_ADVICE}")
    for magic, advice in _KNOWN_MISTAKES.items():
        if start.startswith(magic):
            raise FormatError(f"{path}: {advice}")


def _open_folder(folder: Path) -> Checkpoint:
    names = sorted(entry.name for entry in folder.iterdir())
    if any(name in (SINGLE_NAME, INDEX_NAME) for name in names):
        return _open_hugging_face(folder)
    ggufs = [name for name in names if name.endswith(".gguf") and not name.startswith("mmproj")]
    sets = sorted({shard_paths(folder / name)[0].name for name in ggufs})
    if len(sets) == 1:
        return _open_file(folder / ggufs[0])
    if sets:
        raise FormatError(f"{folder}: holds several models; name one of {', '.join(sets[:20])}")
    raise FormatError(f"{folder}: {_what_is_wrong(names)}")


def _what_is_wrong(names: list[str]) -> str:
    """Why a folder without usable weights cannot be opened."""
    wanted = f"a model folder holds a .gguf file, or config.json and {SINGLE_NAME}"
    if not names:
        return f"is empty; {wanted}"
    if "adapter_config.json" in names:
        return "holds a LoRA adapter, not a model; give the base model's folder"
    tensors = [name for name in names if name.endswith(".safetensors")]
    if tensors:
        return f"holds {', '.join(tensors[:5])} but neither {SINGLE_NAME} nor {INDEX_NAME}"
    pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    if pickles:
        return f"{pickles[0]} {_PICKLE_ADVICE}"
    return f"holds no model ({', '.join(names[:10])}); {wanted}"


def _open_hugging_face(folder: Path) -> Checkpoint:
    if not (folder / "config.json").is_file():
        raise FormatError(f"{folder}: config.json is missing; download the whole model folder")
    metadata = read_json(folder / "config.json")
    for name, key, limit in _EXTRA_FILES:
        if (folder / name).is_file():
            metadata[key] = read_json(folder / name, limit)
    template = _chat_template(folder, metadata)
    if template is not None:
        metadata["chat_template"] = template
    return Checkpoint(str(folder), "hf", metadata, _open_weights(folder))


_EXTRA_FILES = (
    ("generation_config.json", "generation_config", MAX_JSON_BYTES),
    ("tokenizer_config.json", "tokenizer_config", MAX_JSON_BYTES),
    ("tokenizer.json", "tokenizer_json", MAX_TOKENIZER_BYTES),
)


def _chat_template(folder: Path, metadata: Mapping[str, Any]) -> str | None:
    """From chat_template.jinja, else chat_template.json, else tokenizer_config.json (if a text)."""
    if (folder / "chat_template.jinja").is_file():
        raw = map_file(folder / "chat_template.jinja")
        if len(raw) > MAX_JSON_BYTES:
            raise FormatError(f"{folder}: chat_template.jinja is over {MAX_JSON_BYTES} bytes")
        try:
            return raw.tobytes().decode()
        except UnicodeDecodeError:
            raise FormatError(f"{folder}: chat_template.jinja is not valid UTF-8") from None
    if (folder / "chat_template.json").is_file():
        template = read_json(folder / "chat_template.json").get("chat_template")
        if not isinstance(template, str):
            raise FormatError(f"{folder}: chat_template.json has no text 'chat_template'")
        return template
    template = metadata.get("tokenizer_config", {}).get("chat_template")
    return template if isinstance(template, str) else None


def _open_weights(folder: Path) -> dict[str, StoredTensor]:
    for name, read in ((SINGLE_NAME, read_safetensors), (INDEX_NAME, read_sharded)):
        path = folder / name
        if path.exists():
            _refuse_mistakes(path, map_file(path)[:32].tobytes())
            return read(path)
    raise AssertionError("called only for folders with weights")
