"""A real uvicorn in a thread on a loopback port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fake_engine import WAIT_S

from headrace.config import ServerConfig
from headrace.server.app import make_server
from headrace.service import Service

Address = tuple[str, int]


@contextmanager
def serving(
    services: Mapping[str, Service], config: ServerConfig | None = None
) -> Iterator[Address]:
    """The socket listens before the server starts, so clients simply connect."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = make_server(services, config or ServerConfig(shutdown_timeout_s=1))
        thread = threading.Thread(target=server.run, args=([sock],))
        thread.start()
        try:
            yield sock.getsockname()
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()


def base_url(address: Address) -> str:
    """What an OpenAI client is given."""
    return f"http://{address[0]}:{address[1]}/v1"
