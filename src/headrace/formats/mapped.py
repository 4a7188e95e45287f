"""Files mapped read-only into memory. No parsing: `gguf` and `safetensors` do that.

Views keep the mapping alive; it is closed with the last of them.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.errors import FormatError, ModelNotFound


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
