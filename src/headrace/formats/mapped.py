"""Files mapped read-only into memory, and what their first bytes show. No parsing.

Views keep the mapping alive; it is closed with the last of them. Pickle checkpoints are refused:
loading one runs whatever program its author put into it.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError, ModelNotFound

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
PICKLE_ADVICE = (
    "is a pickle checkpoint; loading one can run any program hidden in it, so it is refused. "
    "Use the model's .safetensors or .gguf files, or convert it where you trust it"
)
_PICKLE_MAGIC = re.compile(rb"\x80[\x02-\x05]")
_ZIP_MAGIC = b"PK\x03\x04"  # what torch.save writes: pickles inside a zip archive
# First bytes of what is often given, or downloaded, by mistake.
_MISTAKES: Mapping[bytes, str] = {
    b"version https://git-lfs": "is a Git LFS pointer, not the file; run `git lfs pull`",
    b"<!DOCTYPE": "is a web page, not a model; download it again",
    b"<!doctype": "is a web page, not a model; download it again",
    b"<html": "is a web page, not a model; download it again",
    b"lmgg": "is a GGML file, older than GGUF; convert the model again",
    b"tjgg": "is a GGJT file, older than GGUF; convert the model again",
    b"fmgg": "is a GGMF file, older than GGUF; convert the model again",
    b"\x89HDF": "is an HDF5 file; only GGUF and safetensors are read",
}


def map_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of a regular file as a read-only array.

    **Raises** `ModelNotFound` when there is none, `FormatError` when it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be opened ({error})") from None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise FormatError(f"{path}: is not a regular file")
        if info.st_size == 0:
            raise FormatError(f"{path}: is empty")
        mapped = mmap.mmap(descriptor, info.st_size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise FormatError(f"{path}: cannot be mapped into memory ({error})") from None
    finally:
        os.close(descriptor)
    return np.frombuffer(mapped, np.uint8)


def forget(view: NDArray[np.uint8]) -> None:
    """Give back the memory a view of a mapped file holds; read again, it comes from the page cache.

    Nothing happens to views of anything else.
    """
    base: object = view
    while isinstance(base, np.ndarray):
        whole, base = base, base.base
    if isinstance(base, memoryview):
        base = base.obj
    if not isinstance(base, mmap.mmap) or not hasattr(base, "madvise"):
        return
    start = view.ctypes.data - whole.ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + view.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:  # only pages that are the view's alone
        base.madvise(mmap.MADV_DONTNEED, first, last - first)


def refuse_mistakes(path: Path, data: NDArray[np.uint8]) -> None:
    """Refuse files whose first bytes (or suffix) show a known kind that is not read here."""
    start = data[:32].tobytes()
    is_pickle = _PICKLE_MAGIC.match(start) or start.startswith(_ZIP_MAGIC)
    if is_pickle or path.suffix in PICKLE_SUFFIXES:
        raise FormatError(f"{path}: {PICKLE_ADVICE}")
    for magic, advice in _MISTAKES.items():
        if start.startswith(magic):
            raise FormatError(f"{path}: {advice}")
