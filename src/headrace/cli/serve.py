"""`headrace serve`: which models, under which names, on which address.

The server listens at once and loads meanwhile, so `/live` answers early and `/ready` turns 200 when
every model can generate.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.cli.options import EngineOptions
from headrace.cli.output import Bars, Terminal
from headrace.cli.tools import TextService, Tools
from headrace.config import ServerConfig
from headrace.errors import InvalidRequest
from headrace.formats.catalogue import DEFAULT_MODEL
from headrace.formats.store import ResolvedModel, resolve


@dataclass(frozen=True)
class ServeTask:
    """The command line of `serve`, parsed."""

    models: Sequence[str]
    host: str
    port: int
    engine: EngineOptions


def serve_models(task: ServeTask, tools: Tools, terminal: Terminal) -> int:
    """Pulls what is missing, then serves until SIGTERM or Ctrl-C; the exit code."""
    task.engine.config()  # a bad option is refused before anything is fetched
    config = ServerConfig(host=task.host, port=task.port)
    store = tools.store()
    found: dict[str, ResolvedModel] = {}
    with Bars(terminal) as bars:
        for name in task.models or [DEFAULT_MODEL]:
            model = resolve(name, store, progress=bars)
            if model.id in found:
                raise InvalidRequest(
                    f"two models would be served as {model.id!r}: {found[model.id].path} and "
                    f"{model.path}; leave one out or rename its file"
                )
            found[model.id] = model
    loaders = {
        name: functools.partial(_load, model, task.engine, tools, terminal)
        for name, model in found.items()
    }
    if not is_loopback(task.host):
        terminal.warn(
            f"{task.host} is reachable from other machines, and this server asks for no key: "
            "anyone who reaches it can use it; put a proxy with authentication before it, or use "
            "--host 127.0.0.1"
        )
    names = ", ".join(found)
    tools.serve(loaders, config, lambda host, port: terminal.note(_welcome(host, port, names)))
    return 0


def _load(
    model: ResolvedModel, options: EngineOptions, tools: Tools, terminal: Terminal
) -> TextService:
    checkpoint = options.applied(tools.open_checkpoint(model.path))
    service = tools.open_service(model.id, checkpoint, options.config())
    terminal.note(f"{model.id} is loaded\n{service.model.memory}")
    return service


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _welcome(host: str, port: int, names: str) -> str:
    shown = f"[{host}]" if ":" in host else host
    return (
        f"serving {names} on http://{shown}:{port}/v1; /ready turns 200 when loaded; Ctrl-C stops"
    )
