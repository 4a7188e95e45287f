"""The door: a path to a model file or folder becomes a `Checkpoint`, or an error that says why.

What a file is shows in its first bytes, not in its name. Nothing is downloaded or converted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import FormatError, ModelNotFound
from headrace.formats.gguf import open_gguf, shard_paths
from headrace.formats.gguf_types import MAGIC
from headrace.formats.json_files import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES, read_json
from headrace.formats.mapped import PICKLE_ADVICE, PICKLE_SUFFIXES, map_file, refuse_mistakes
from headrace.formats.safetensors import INDEX_NAME, SINGLE_NAME, read_safetensors, read_sharded
from headrace.types import Checkpoint, StoredTensor


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a .gguf file (or shard), a folder with one, or a Hugging Face folder.

    A folder with both safetensors and GGUF is read as a Hugging Face folder.

    **Raises** `ModelNotFound` when nothing is there, `FormatError` for everything that is there
    but cannot be used.
    """
    path = Path(path)
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:  # such as a name that is too long
        raise FormatError(f"{path}: cannot be opened ({error})") from None
    if not is_there:
        raise ModelNotFound(f"{path}: there is no such file or folder")
    return _open_folder(path) if is_folder else _open_file(path)


def _open_file(path: Path) -> Checkpoint:
    data = map_file(path)
    start = data[:8].tobytes()
    if start.startswith(MAGIC):
        return open_gguf(path)
    refuse_mistakes(path, data)
    if path.suffix == ".safetensors":
        raise FormatError(
            f"{path}: a safetensors file alone does not say what model it is; give the folder "
            "that holds it together with config.json and tokenizer.json"
        )
    raise FormatError(f"{path}: is neither GGUF nor a model folder (it starts with {start!r})")


def _open_folder(folder: Path) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise FormatError(f"{folder}: cannot be listed ({error})") from None
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
        return f"{pickles[0]} {PICKLE_ADVICE}"
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
    """The single file wins where both are there, as in transformers."""
    single = folder / SINGLE_NAME
    if single.exists() or single.is_symlink():  # a broken link: an error that names it
        return read_safetensors(single)
    return read_sharded(folder / INDEX_NAME)
