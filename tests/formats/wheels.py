"""Tiny wheels and a pip that only sees a folder of them: the real transport, without a network."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from headrace.formats.catalogue import CatalogueEntry, WheelPart


def make_wheel(folder: Path, name: str, version: str, files: Mapping[str, bytes]) -> Path:
    """A wheel that pip accepts (PEP 427)."""
    safe = name.replace("-", "_")
    info = f"{safe}-{version}.dist-info"
    meta = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    path = folder / f"{safe}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in {**files, **meta}.items():
            archive.writestr(member, data)
    return path


def use_local_index(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Pip settings of a user whose only index is `folder`."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")


def make_entry(parts: Mapping[str, bytes]) -> CatalogueEntry:
    """A catalogue entry whose file is the joined parts; each lies in package `NAME` as `part`."""
    whole = b"".join(parts.values())
    return CatalogueEntry(
        name="tiny:1b",
        file_name="tiny.gguf",
        sha256=hashlib.sha256(whole).hexdigest(),
        num_bytes=len(whole),
        parts=tuple(
            WheelPart(f"{name}==1.0", "part", len(data), hashlib.sha256(data).hexdigest(), 1000)
            for name, data in parts.items()
        ),
        licence="CC0-1.0",
        licence_url="https://example.invalid/licence",
    )


class Recorder:
    """A `Progress` that keeps what it was told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[tuple[str, int, int | None]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def advance(self, label: str, done_bytes: int, total_bytes: int | None) -> None:
        self.steps.append((label, done_bytes, total_bytes))
