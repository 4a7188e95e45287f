"""Models from a hub: which files are chosen, and a pull through huggingface_hub itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_hub import COMMIT, Hub, serve_hub
from wheels import Recorder

from headrace.config import StoreConfig
from headrace.errors import DownloadError, FormatError
from headrace.formats.download import HubFile, HubListing
from headrace.formats.fetch import choose_hub_files
from headrace.formats.store import list_models, list_partial, resolve

FOLDER = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "README.md": b"words",
    "model.safetensors": b"weights" * 5000,
    "pytorch_model.bin": b"pickle",
    "onnx/model.safetensors": b"other",
}


@pytest.fixture
def config(tmp_path: Path) -> StoreConfig:
    return StoreConfig(root=tmp_path / "store", download_retries=0)


def _use(monkeypatch: pytest.MonkeyPatch, address: str, tmp_path: Path) -> None:
    for name, value in (
        ("HF_ENDPOINT", address),
        ("HF_HOME", str(tmp_path / "hf")),
        ("HF_HUB_DISABLE_XET", "1"),
        ("HF_HUB_OFFLINE", "0"),
        ("HF_HUB_DISABLE_TELEMETRY", "1"),
        ("NO_PROXY", "127.0.0.1"),
    ):
        monkeypatch.setenv(name, value)


def test_a_folder_is_pulled_and_a_failed_pull_resumes(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(dict(FOLDER), broken={"model.safetensors"})
    with serve_hub(hub) as address:
        _use(monkeypatch, address, tmp_path)
        with pytest.raises(DownloadError, match="the hub did not give owner/repo"):
            resolve("hf:owner/repo", config)
        assert [item.id for item in list_partial(config)] == ["hf:owner/repo"]
        hub.broken.clear()
        model = resolve("hf:owner/repo", config, progress=Recorder())
    assert sorted(hub.served) == ["config.json", "model.safetensors", "tokenizer.json"]
    held = {path.name: path.read_bytes() for path in model.path.iterdir()}
    del held["manifest.json"]
    assert held == {name: FOLDER[name] for name in hub.served}
    (found,) = list_models(config)
    assert (found.licence, found.revision, found.entry) == ("mit", COMMIT, ".")
    assert resolve("hf:owner/repo", config) == model  # the hub is gone


def test_a_file_that_does_not_sum_up_is_refused(
    config: StoreConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub({"a-Q4_0.gguf": b"GGUF" * 100}, sums={"a-Q4_0.gguf": "0" * 64})
    with serve_hub(hub) as address:
        _use(monkeypatch, address, tmp_path)
        with pytest.raises(DownloadError, match=r"a-Q4_0\.gguf sums to"):
            resolve("hf:owner/repo", config)
    assert list_models(config) == []


def _listing(*names: str) -> HubListing:
    files = tuple(HubFile(name, 1_000_000, None) for name in names)
    return HubListing("owner/repo", COMMIT, None, files)


_QUANTS = ("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "mmproj-m.gguf", "README.md")
_SHARDS = tuple(f"big/m-Q8_0-{i:05d}-of-00003.gguf" for i in (1, 2, 3))


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        (("m.gguf", "README.md"), None, ("m.gguf",)),
        (_QUANTS, "Q4_K_M", ("m-Q4_K_M.gguf",)),
        (_QUANTS, "q8_0", ("m-Q8_0.gguf",)),
        (_QUANTS, "m-Q4_K_S.gguf", ("m-Q4_K_S.gguf",)),
        (_SHARDS, None, _SHARDS),
        ((*_SHARDS, "m-Q4_0.gguf"), "Q8_0", _SHARDS),
        ((*_SHARDS, "m-Q4_0.gguf"), _SHARDS[0], _SHARDS),
        (
            ("model-00001-of-00002.safetensors", "config.json", "model-00002-of-00002.safetensors",
             "model.safetensors.index.json", "consolidated.safetensors", "m.gguf"),
            None,
            ("config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
             "model-00002-of-00002.safetensors"),
        ),
    ],
)  # fmt: skip
def test_the_files_of_one_model(
    names: tuple[str, ...], wanted: str | None, chosen: tuple[str, ...]
) -> None:
    assert tuple(file.path for file in choose_hub_files(_listing(*names), wanted)) == chosen


@pytest.mark.parametrize(
    ("names", "wanted", "said"),
    [
        (_QUANTS, None, r"several GGUF models.*m-Q4_K_M\.gguf \(1 MB\), m-Q4_K_S\.gguf"),
        (_QUANTS, "Q5_0", r"no GGUF file 'Q5_0'; it has: m-Q4_K_M\.gguf"),
        (_QUANTS, "Q4_K", "no GGUF file 'Q4_K'"),
        (("pytorch_model.bin", "config.json"), None, "pickle"),
        (("README.md",), None, "neither safetensors"),
        (_SHARDS[:2], None, "should have 3 shards"),
        (("model.safetensors",), None, r"neither safetensors with config\.json"),
    ],
)
def test_no_single_model_is_an_error_that_lists(
    names: tuple[str, ...], wanted: str | None, said: str
) -> None:
    with pytest.raises(FormatError, match=said):
        choose_hub_files(_listing(*names), wanted)
