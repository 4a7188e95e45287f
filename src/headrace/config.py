"""Every option and environment variable, typed, with its default and its reason.

The only file that reads `os.environ`. Every queue, loop, body, wait and cache takes its limit from
here. An unknown option
or a bad value is an error, never a silent default.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.errors import InvalidRequest


@dataclass(frozen=True)
class EngineConfig:
    """How the engine schedules and what it may hold.

    **Units** `kv_cache_bytes` None: sized from available memory. `num_threads` 0: one per core
    this process may use.
    """

    backend: Literal["cpu", "reference"] = "cpu"
    num_threads: int = 0
    max_context: int | None = None  # None: the model's own, or what the KV pool can hold
    max_running: int = 64  # sequences in one step
    max_waiting: int = 1024  # requests queued; past it: Overloaded
    step_tokens: int = 512  # token budget of one step (prefill chunk and decodes together)
    kv_cache_bytes: int | None = None
    kv_memory_fraction: float = 0.4  # of the memory available after the weights are loaded
    kv_cache_max_bytes: int = 4 << 30
    kv_dtype: Literal["f16", "f32"] = "f16"
    prefix_cache: bool = True


@dataclass(frozen=True)
class ServerConfig:
    """Limits of the HTTP front; each refusal names the number."""

    host: str = "127.0.0.1"
    port: int = 8000
    max_body_bytes: int = 8 << 20
    max_prompts: int = 64  # prompts in one completions request
    max_choices: int = 256  # prompts times n
    max_buffered_events: int = 4096  # per stream; a reader slower than this is cut off
    max_connections: int = 1024
    head_timeout_s: float = 20.0  # a request's head must have arrived by then
    body_timeout_s: float = 60.0  # a body must have arrived by then
    request_timeout_s: float = 3600.0
    # Silence on a stream after which a comment line is sent; a frame that could not be handed over
    # for as long ends the connection.
    keep_alive_s: float = 15.0
    probe_timeout_s: float = 30.0  # a health probe that has no token by then has failed
    shutdown_timeout_s: float = 30.0  # open answers may finish this long after SIGTERM


@dataclass(frozen=True)
class StoreConfig:
    """Where models live and how they are fetched."""

    root: Path
    download_timeout_s: float = 60.0
    download_retries: int = 5
    lock_wait_s: float = 3600.0  # for another process that pulls the same model
    is_offline: bool = False


@dataclass(frozen=True)
class TemplateConfig:
    """Limits on a chat template, which is an untrusted program."""

    max_template_bytes: int = 1 << 18  # the longest known has 40 kB; compiling is not timed
    max_output_chars: int = 8 << 20
    timeout_s: float = 2.0


def store_config(environ: Mapping[str, str] = os.environ) -> StoreConfig:
    """HEADRACE_HOME (default: `headrace` in the user's cache folder), HEADRACE_OFFLINE,
    HF_HUB_OFFLINE.

    **Raises** `InvalidRequest`.
    """
    offline = any(_flag(environ, name) for name in ("HEADRACE_OFFLINE", "HF_HUB_OFFLINE"))
    return StoreConfig(root=_store_root(environ), is_offline=offline)


def _store_root(environ: Mapping[str, str]) -> Path:
    given = environ.get("HEADRACE_HOME")
    if given:
        if not Path(given).is_absolute():  # "~" too, which is the shell's to expand
            raise InvalidRequest(
                f"HEADRACE_HOME={given!r} would be another folder for each place a command runs "
                "in; give a whole path that starts with /",
                param="HEADRACE_HOME",
            )
        return Path(given)
    cache = environ.get("XDG_CACHE_HOME", "")
    if Path(cache).is_absolute():  # the XDG specification: a relative one is to be ignored
        return Path(cache) / "headrace"
    try:
        return Path.home() / ".cache" / "headrace"
    except RuntimeError:
        raise InvalidRequest(
            "this user has no home folder to keep models in; set HEADRACE_HOME to a folder",
            param="HEADRACE_HOME",
        ) from None


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment plus `extra`, for a child process."""
    return {**os.environ, **extra}


def _flag(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise InvalidRequest(f"{name}={value!r}: use 1 or 0", param=name)
