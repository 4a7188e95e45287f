"""A connection that never brings a request's head does not stay."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
from fake_engine import WAIT_S, endless
from serving import Address, serving

from headrace.config import ServerConfig
from headrace.service import Service

MakeService = Callable[..., Service]
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
HASTY = ServerConfig(head_timeout_s=0.05, shutdown_timeout_s=1)


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=WAIT_S)


def read_answer(client: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b'{"status":"alive"}'):
        data = client.recv(4096)
        assert data, f"the connection ended after {found!r}"
        found += data
    return found


@pytest.mark.parametrize("sent", [b"", b"GET", LIVE[:-2]])
def test_half_a_head_ends_the_connection(make_service: MakeService, sent: bytes) -> None:
    with serving({"bytes": make_service()}, HASTY) as address, connect(address) as client:
        client.sendall(sent)
        assert client.recv(1) == b""


def test_half_of_a_second_head_ends_the_connection(make_service: MakeService) -> None:
    with serving({"bytes": make_service()}, HASTY) as address, connect(address) as client:
        client.sendall(LIVE)
        assert read_answer(client).startswith(b"HTTP/1.1 200")
        client.sendall(LIVE[:10])
        assert client.recv(1) == b""


def test_more_bytes_of_a_head_do_not_extend_its_time(make_service: MakeService) -> None:
    is_over = threading.Event()
    with serving({"bytes": make_service()}, HASTY) as address, connect(address) as client:

        def drip() -> None:
            while not is_over.wait(0.01):
                try:
                    client.sendall(b"G")
                except OSError:  # the other side has ended
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert client.recv(1) == b""
        except ConnectionResetError:  # it ended while more was under way
            pass
        finally:
            is_over.set()
            thread.join()


def test_an_answer_may_take_longer_than_a_head(make_service: MakeService) -> None:
    gate = threading.Semaphore(0)
    service = make_service(script=endless, gate=gate)
    body = b'{"model":"bytes","prompt":"x","max_tokens":2}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with (
        serving({"bytes": service}, HASTY) as address,
        connect(address) as client,
        connect(address) as witness,
    ):
        client.sendall(head + body)
        assert witness.recv(1) == b""  # the time of a head has passed
        gate.release(9)
        assert client.recv(12) == b"HTTP/1.1 200"
