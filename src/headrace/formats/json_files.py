"""JSON from untrusted files: bounded in size and depth, no repeated keys, no NaN.

Only objects are accepted at the top: every JSON file of a model folder is one.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from headrace.errors import FormatError
from headrace.formats.mapped import map_file, refuse_mistakes

MAX_JSON_BYTES = 1 << 24  # config files are kilobytes; large indexes a few megabytes
MAX_TOKENIZER_BYTES = 1 << 27  # Gemma's tokenizer.json has 33 MB
# Every value but the first of its list or object follows a comma, so commas bound the memory that
# parsing takes. Gemma's tokenizer.json has 1.3 million.
MAX_COMMAS = 1 << 22


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The object in a file. **Raises** `FormatError` that names the file and the fault."""
    data = map_file(path)
    if len(data) > max_bytes:
        raise FormatError(f"{path}: has {len(data)} bytes; the limit is {max_bytes}")
    refuse_mistakes(path, data)
    return parse_json(data.tobytes(), str(path))


def parse_json(raw: bytes, source: str) -> dict[str, Any]:
    """The object in `raw`; `source` opens every message."""
    if raw.count(b",") > MAX_COMMAS:
        raise FormatError(f"{source}: holds more than {MAX_COMMAS} values")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError:
        raise FormatError(f"{source}: is nested too deeply") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise FormatError(f"{source}: is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise FormatError(f"{source}: holds a {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"the key {counts.most_common(1)[0][0][:80]!r} is there twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
