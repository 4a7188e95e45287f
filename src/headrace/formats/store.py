"""The local model store: resolve a name, pull, verify, list, remove; the only downloader.

Under `StoreConfig.root`: `models/<slug>/` holds one whole model and its `manifest.json`,
`partial/<slug>/` what an unfinished pull has so far, `locks/` one lock file per model. A model
appears by one atomic rename after its sum was checked, so what lies in `models/` is whole. A name
that is there is answered without the network. How bytes travel is `download`'s matter.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import sleep

from headrace.config import StoreConfig
from headrace.errors import DownloadError, InvalidRequest, ModelNotFound
from headrace.formats.download import Progress, Silent, file_sha256, folder_bytes
from headrace.formats.fetch import Fetched, fetch
from headrace.formats.names import (
    CatalogueName,
    ModelName,
    PathName,
    StoredName,
    parse_name,
)

LOCK_POLL_S = 0.2
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that can be opened: `path` is a GGUF file (or its first shard) or a folder."""

    path: Path
    id: str
    source: str
    licence: str | None = None


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a stored model, relative to its folder."""

    path: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A manifest: what was pulled, from where, when; `entry` is what to open, "." the folder."""

    id: str
    source: str
    licence: str | None
    revision: str | None
    entry: str
    files: tuple[StoredFile, ...]
    pulled: str

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class PartialPull:
    """What an unfinished pull left behind."""

    id: str
    num_bytes: int


# ---- resolve and pull
#


def resolve(name: str, config: StoreConfig, *, progress: Progress | None = None) -> ResolvedModel:
    """The model of this name, pulled first when it is not here.

    **Raises** `ModelNotFound`, `InvalidRequest` (malformed name), `DownloadError`.
    """
    target = parse_name(name, installed_ids(config))
    if isinstance(target, PathName):
        return _resolve_path(target.path)
    found = _installed(target, config)
    if found is not None:
        return _resolved(found, target, config)
    return pull(name, config, progress=progress)


def resolve_local(name: str, config: StoreConfig) -> ResolvedModel:
    """As `resolve`, but never fetches. **Raises** `ModelNotFound` when it is not here."""
    target = parse_name(name, installed_ids(config))
    if isinstance(target, PathName):
        return _resolve_path(target.path)
    found = _installed(target, config)
    if found is None:
        raise ModelNotFound(
            f"{target.id} is not in the store {config.root}; 'headrace pull {target.id}' fetches it"
        )
    return _resolved(found, target, config)


def pull(name: str, config: StoreConfig, *, progress: Progress | None = None) -> ResolvedModel:
    """Fetches the model unless it is here; two pulls of one model wait for each other.

    **Raises** as `resolve`; after a failure or an interruption, a repeated call resumes.
    """
    return pull_target(_stored_name(name, config), config, progress or Silent())


def pull_target(target: StoredName, config: StoreConfig, progress: Progress) -> ResolvedModel:
    """As `pull`, for a name that was parsed."""
    if config.is_offline and _installed(target, config) is None:
        raise DownloadError(
            f"{target.id} is not in the store {config.root} and headrace is offline "
            "(HEADRACE_OFFLINE or HF_HUB_OFFLINE is set); pull it while online, or give a path"
        )
    with _lock(target, config, progress, config.lock_wait_s):
        found = _installed(target, config)
        if found is None:
            found = _pull_locked(target, config, progress)
    return _resolved(found, target, config)


def _pull_locked(target: StoredName, config: StoreConfig, progress: Progress) -> StoredModel:
    final = _model_folder(target, config)
    if final.exists():
        progress.note(f"{target.id} in the store is damaged; it is fetched again")
        shutil.rmtree(final)
    partial = _partial_folder(target, config)
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "name").write_text(target.id + "\n")
    ready = partial / "ready"
    shutil.rmtree(ready, ignore_errors=True)
    ready.mkdir()
    try:
        fetched = fetch(target, partial, ready, config, progress)
    except BaseException:
        shutil.rmtree(ready, ignore_errors=True)
        if not any(path.is_file() and path.name != "name" for path in partial.rglob("*")):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    model = _write_manifest(target, fetched, ready)
    final.parent.mkdir(parents=True, exist_ok=True)
    ready.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(partial, ignore_errors=True)
    return model


def _write_manifest(target: StoredName, fetched: Fetched, ready: Path) -> StoredModel:
    files = tuple(
        StoredFile(path, (ready / path).stat().st_size, sha256)
        for path, sha256 in fetched.sha256.items()
    )
    written = max((ready / file.path).stat().st_mtime for file in files)
    model = StoredModel(
        id=target.id,
        source=fetched.source,
        licence=fetched.licence,
        revision=fetched.revision,
        entry=fetched.entry,
        files=files,
        pulled=datetime.fromtimestamp(written, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    for file in files:
        _sync_file(ready / file.path)
    with open(ready / MANIFEST, "w", encoding="utf-8") as sink:
        json.dump(asdict(model), sink, indent=1)
        sink.flush()
        os.fsync(sink.fileno())
    return model


def _resolve_path(path: Path) -> ResolvedModel:
    if path.is_dir() and not (path / "config.json").is_file():
        path = _only_gguf(path)
    name = path.resolve().name if path.is_dir() else path.stem
    return ResolvedModel(path, name, "path")


def _only_gguf(folder: Path) -> Path:
    """The one GGUF model of a folder; of a sharded one, the first shard."""
    files = sorted(path for path in folder.glob("*.gguf") if path.is_file())
    first = [path for path in files if "-of-" not in path.name or "-00001-of-" in path.name]
    if len(first) == 1:
        return first[0]
    if first:
        names = ", ".join(path.name for path in first)
        raise ModelNotFound(f"{folder} holds several GGUF models: {names}; give the file's path")
    raise ModelNotFound(
        f"{folder} is no model folder: it has neither config.json (with safetensors) nor a .gguf"
    )


# ---- list, verify, remove
#


def list_models(config: StoreConfig) -> list[StoredModel]:
    """Every whole model of the store, by id."""
    folders = (config.root / "models").glob(f"*/{MANIFEST}")
    found = (_read_manifest(path.parent) for path in folders)
    return sorted((model for model in found if model is not None), key=lambda model: model.id)


def installed_ids(config: StoreConfig) -> list[str]:
    return [model.id for model in list_models(config)]


def list_partial(config: StoreConfig) -> list[PartialPull]:
    """Unfinished pulls, which `pull` resumes and `remove_model` deletes."""
    names = sorted((config.root / "partial").glob("*/name"))
    return [PartialPull(path.read_text().strip(), folder_bytes(path.parent)) for path in names]


def model_path(model: StoredModel, config: StoreConfig) -> Path:
    """Where a listed model lies."""
    return _model_folder(_stored_name(model.id, config), config) / model.entry


def verify_model(name: str, config: StoreConfig, *, progress: Progress | None = None) -> None:
    """Sums every file of a stored model again. **Raises** `DownloadError` at the first that
    differs from its manifest."""
    target = _stored_name(name, config)
    model = _installed(target, config)
    if model is None:
        raise ModelNotFound(f"{target.id} is not in the store; 'headrace pull {name}' fetches it")
    for file in model.files:
        path = _model_folder(target, config) / file.path
        found = file_sha256(path, f"checking {file.path}", progress or Silent())
        if found != file.sha256:
            raise DownloadError(
                f"{path} has sha256 {found}, its manifest says {file.sha256}; "
                f"'headrace rm {name}', then pull it again"
            )


def remove_model(name: str, config: StoreConfig) -> int:
    """Deletes a model and its unfinished pull; only inside the store. Returns the bytes freed.

    **Raises** `ModelNotFound`; `InvalidRequest` for a path or a model being pulled right now.
    """
    target = _stored_name(name, config)
    with _lock(target, config, Silent(), 0.0):
        folders = [_model_folder(target, config), _partial_folder(target, config)]
        present = [folder for folder in folders if folder.is_dir()]
        if not present:
            held = ", ".join(installed_ids(config)) or "nothing"
            raise ModelNotFound(f"{target.id} is not in the store; it holds: {held}")
        freed = sum(folder_bytes(folder) for folder in present)
        for folder in present:
            shutil.rmtree(folder)
    return freed


# ---- layout
#


def _stored_name(name: str, config: StoreConfig) -> StoredName:
    target: ModelName = parse_name(name, installed_ids(config))
    if isinstance(target, PathName):
        raise InvalidRequest(
            f"{name} is a path; only models of the store ({config.root}) are pulled, verified or "
            "removed here",
            param="model",
        )
    return target


def _model_folder(target: StoredName, config: StoreConfig) -> Path:
    return _inside(config.root / "models", target.slug)


def _partial_folder(target: StoredName, config: StoreConfig) -> Path:
    return _inside(config.root / "partial", target.slug)


def _inside(parent: Path, slug: str) -> Path:
    path = parent / slug
    assert path.parent == parent, f"unsafe slug {slug!r}"
    assert slug not in ("", ".", ".."), f"unsafe slug {slug!r}"
    if path.is_symlink():
        raise InvalidRequest(f"{path} is a symbolic link; the store holds plain folders only")
    return path


def _installed(target: StoredName, config: StoreConfig) -> StoredModel | None:
    """The manifest of a model whose files are all there at their recorded sizes, else None."""
    folder = _model_folder(target, config)
    model = _read_manifest(folder)
    if model is None or model.id != target.id or not model.files:
        return None
    for file in model.files:
        path = folder / file.path
        if not path.is_file() or path.stat().st_size != file.num_bytes:
            return None
    return model


def _resolved(model: StoredModel, target: StoredName, config: StoreConfig) -> ResolvedModel:
    path = _model_folder(target, config) / model.entry
    name = target.id if isinstance(target, CatalogueName) else model.id
    return ResolvedModel(path, name, model.source, model.licence)


def _read_manifest(folder: Path) -> StoredModel | None:
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = tuple(StoredFile(**file) for file in found.pop("files"))
        return StoredModel(**found, files=files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


@contextmanager
def _lock(
    target: StoredName, config: StoreConfig, progress: Progress, wait_s: float
) -> Iterator[None]:
    """Holds the model's lock file; the kernel frees it when the process ends, however it ends."""
    path = config.root / "locks" / f"{target.slug}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as handle:
        for attempt in range(1 + int(wait_s / LOCK_POLL_S)):
            if _try_lock(handle.fileno()):
                break
            if attempt == 0 and wait_s > 0:
                progress.note(f"another headrace is pulling {target.id}; waiting for it")
            sleep(LOCK_POLL_S)
        else:
            raise InvalidRequest(
                f"another headrace is pulling {target.id}; try again when it has finished"
            )
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


_sync_folder = _sync_file
