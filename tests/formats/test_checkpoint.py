"""Opening files and folders: what is found, what is preferred, what is refused and why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_gguf
from raw_safetensors import GOOD, build, entry

from headrace.errors import FormatError, ModelNotFound
from headrace.formats import gguf, open_checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


def save(path: Path, data: bytes | str | dict[str, Any]) -> Path:
    if isinstance(data, dict):
        data = json.dumps(data)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def hugging_face(folder: Path) -> Path:
    save(folder / "config.json", CONFIG)
    save(folder / "model.safetensors", GOOD)
    return folder


def refused(path: Path) -> str:
    with pytest.raises(FormatError) as caught:
        open_checkpoint(path)
    assert str(path) in caught.value.message
    return caught.value.message


def test_a_gguf_file_opens_whatever_its_name(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(save(tmp_path / "sha256-00ff", raw_gguf.Raw().build())))
    assert checkpoint.dialect == "gguf"
    assert checkpoint.metadata == {"general.architecture": "llama"}
    assert list(checkpoint.tensors) == ["a", "b"]


def test_a_folder_with_one_gguf_opens_it_and_passes_over_projectors(tmp_path: Path) -> None:
    save(tmp_path / "m.gguf", raw_gguf.Raw().build())
    save(tmp_path / "mmproj-m.gguf", b"GGUF")
    save(tmp_path / "README.md", "hello")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path == str(tmp_path / "m.gguf")


def test_a_folder_with_a_shard_set_opens_it(tmp_path: Path) -> None:
    for number in range(2):
        keys = {"split.no": number, "split.count": 2, "split.tensors.count": 0}
        gguf.write_gguf(tmp_path / f"m-0000{number + 1}-of-00002.gguf", keys, [])
    assert open_checkpoint(tmp_path).path == str(tmp_path / "m-00001-of-00002.gguf")
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    with pytest.raises(FormatError, match="1 of 2 shards are missing"):
        open_checkpoint(tmp_path)


def test_a_folder_with_several_ggufs_asks_which(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        save(tmp_path / name, raw_gguf.Raw().build())
    assert "several models; name one of a.gguf, b.gguf" in refused(tmp_path)


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    hugging_face(tmp_path)
    save(tmp_path / "generation_config.json", {"eos_token_id": [1, 2]})
    save(tmp_path / "tokenizer_config.json", {"bos_token": "<s>", "chat_template": "from config"})
    save(tmp_path / "tokenizer.json", {"model": {"type": "BPE"}})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.dialect == "hf"
    assert checkpoint.path == str(tmp_path)
    assert list(checkpoint.tensors) == ["a", "b", "c"]
    assert checkpoint.metadata == {
        **CONFIG,
        "generation_config": {"eos_token_id": [1, 2]},
        "tokenizer_config": {"bos_token": "<s>", "chat_template": "from config"},
        "tokenizer_json": {"model": {"type": "BPE"}},
        "chat_template": "from config",
    }


def test_template_files_come_before_the_tokenizer_config(tmp_path: Path) -> None:
    hugging_face(tmp_path)
    assert "chat_template" not in open_checkpoint(tmp_path).metadata
    save(tmp_path / "tokenizer_config.json", {"chat_template": "config"})
    assert open_checkpoint(tmp_path).metadata["chat_template"] == "config"
    save(tmp_path / "chat_template.json", {"chat_template": "json"})
    assert open_checkpoint(tmp_path).metadata["chat_template"] == "json"
    save(tmp_path / "chat_template.jinja", "jinja é")
    assert open_checkpoint(tmp_path).metadata["chat_template"] == "jinja é"


def test_safetensors_come_before_gguf(tmp_path: Path) -> None:
    save(hugging_face(tmp_path) / "m.gguf", raw_gguf.Raw().build())
    assert open_checkpoint(tmp_path).dialect == "hf"


def test_a_sharded_hugging_face_folder(tmp_path: Path) -> None:
    save(tmp_path / "config.json", CONFIG)
    save(tmp_path / "x.safetensors", build({"w": entry("F32", [1], 0, 4)}, bytes(4)))
    save(tmp_path / "model.safetensors.index.json", {"weight_map": {"w": "x.safetensors"}})
    assert list(open_checkpoint(tmp_path).tensors) == ["w"]


def test_links_into_a_blob_cache_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    hugging_face(blobs)
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).symlink_to(blobs / name)
    assert list(open_checkpoint(snapshot).tensors) == ["a", "b", "c"]
    (blobs / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"model\.safetensors"):
        open_checkpoint(snapshot)


@pytest.mark.parametrize("name", ["missing", "missing.gguf", "no/such/folder", "nul\0byte"])
def test_a_missing_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        open_checkpoint(tmp_path / name)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises((FormatError, ModelNotFound)):
        open_checkpoint(tmp_path / ("n" * 5000))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("m.bin", b"x" * 99, ("pickle", "any program", ".safetensors or .gguf")),
        ("m.pth", b"x", ("pickle",)),
        ("weights", b"\x80\x02}q\x00.", ("pickle",)),
        ("weights", b"PK\x03\x04" + bytes(99), ("pickle",)),
        ("model.gguf", b"PK\x03\x04" + bytes(99), ("pickle",)),
        ("model.safetensors", b"PK\x03\x04" + bytes(99), ("pickle",)),
        ("m.gguf", b"version https://git-lfs.github.com/spec/v1\noid", ("LFS", "git lfs pull")),
        ("m.gguf", b"<!DOCTYPE html><html>", ("web page", "download")),
        ("m.bin.old", b"tjgg" + bytes(99), ("GGJT", "convert")),
        ("m.h5", b"\x89HDF\r\n", ("HDF5",)),
        ("model.safetensors", GOOD, ("alone", "folder", "config.json")),
        ("m.gguf", b"", ("is empty",)),
        ("m.gguf", b"hello", ("neither GGUF nor", "b'hello'")),
    ],
)
def test_files_that_are_not_models(
    tmp_path: Path, name: str, data: bytes, words: tuple[str, ...]
) -> None:
    message = refused(save(tmp_path / name, data))
    assert all(word in message for word in words)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], ("is empty", "config.json")),
        (["README.md"], ("holds no model", "README.md")),
        (["config.json", "pytorch_model.bin"], ("pytorch_model.bin", "pickle")),
        (["consolidated.00.pth"], ("consolidated.00.pth", "pickle")),
        (["adapter_config.json", "adapter_model.safetensors"], ("LoRA", "base model")),
        (["config.json", "other.safetensors"], ("other.safetensors", "neither")),
        (["model.safetensors"], ("config.json is missing",)),
        (["mmproj-x.gguf"], ("holds no model",)),
    ],
)
def test_folders_without_a_model(tmp_path: Path, names: list[str], words: tuple[str, ...]) -> None:
    for name in names:
        save(tmp_path / name, b"{}")
    message = refused(tmp_path)
    assert all(word in message for word in words)


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "tokenizer.json",
        "chat_template.json",
    ],
)
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"{", "not valid JSON"),
        (b"[1]", "holds a list, not an object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1, "a": 2}', "'a' is there twice"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b'{"a":' * 50_000, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1", "LFS"),
    ],
)
def test_unreadable_json_is_refused(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    save(hugging_face(tmp_path) / name, data)
    with pytest.raises(FormatError) as caught:
        open_checkpoint(tmp_path)
    assert name in caught.value.message
    assert words in caught.value.message


def test_large_json_is_refused(tmp_path: Path) -> None:
    with (hugging_face(tmp_path) / "config.json").open("wb") as file:
        file.truncate(1 << 25)  # sparse: takes no disk
    assert "limit is 16777216" in refused(tmp_path)


def test_a_large_template_is_refused(tmp_path: Path) -> None:
    with (hugging_face(tmp_path) / "chat_template.jinja").open("wb") as file:
        file.truncate(1 << 25)
    assert "chat_template.jinja is over 16777216 bytes" in refused(tmp_path)


@pytest.mark.parametrize("template", [{}, {"chat_template": 3}])
def test_a_template_file_without_a_template_is_refused(
    tmp_path: Path, template: dict[str, Any]
) -> None:
    save(hugging_face(tmp_path) / "chat_template.json", template)
    assert "chat_template" in refused(tmp_path)


def test_a_template_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    save(hugging_face(tmp_path) / "chat_template.jinja", b"\xff")
    assert "UTF-8" in refused(tmp_path)


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    assert "not a regular file" in refused(tmp_path / "m.gguf")


def test_views_outlive_the_file(tmp_path: Path) -> None:
    """A model that is removed or replaced (by rename) while open keeps working."""
    path = save(tmp_path / "m.gguf", raw_gguf.Raw().build())
    tensor = open_checkpoint(path).tensors["a"]
    path.unlink()
    np.testing.assert_array_equal(tensor.data, np.arange(32, dtype=np.uint8))
