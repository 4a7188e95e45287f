"""`serve` as a process: it listens at once, loads behind, ends in order."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fake_engine import WAIT_S, endless
from serving import base_url, serving

from headrace.config import ServerConfig
from headrace.errors import InvalidRequest, UnsupportedModel
from headrace.server.app import serve, serve_loading
from headrace.service import Service

MakeService = Callable[..., Service]

# The engine waits at its gate for each token; SIGTERM arrives while the answer is open.
PROGRAM = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from byte_model import byte_model
from fake_engine import FakeEngine, endless
from headrace.config import ServerConfig
from headrace.server.app import serve
from headrace.service import Service

gate = threading.Semaphore(1)
service = Service(byte_model(), FakeEngine(endless, gate))
threading.Thread(target=lambda: (sys.stdin.readline(), gate.release(9)), daemon=True).start()
serve({"bytes": service}, ServerConfig(port=0), lambda host, port: print(port, flush=True))
print("closed", service.stats().num_running, flush=True)
"""


def test_sigterm_lets_open_answers_finish() -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", PROGRAM, here]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}/v1/completions"
        body = {"model": "bytes", "prompt": "x", "max_tokens": 5, "stream": True}
        with httpx.stream("POST", url, json=body, timeout=WAIT_S) as response:
            lines = response.iter_lines()
            assert "data: " in next(lines)
            process.send_signal(signal.SIGTERM)
            process.stdin.write("\n")
            process.stdin.flush()
            rest = list(lines)
        assert rest[-2] == "data: [DONE]"
        assert sum('"text":"' in line for line in rest) >= 4
        assert process.stdout.readline() == "closed 0\n"
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_second_signal_ends_open_answers_with_an_error(is_stream: bool) -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", PROGRAM, here]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        body = {"model": "bytes", "prompt": "x", "stream": is_stream}
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=WAIT_S)
            while 'running{model="bytes"} 1' not in httpx.get(f"{url}/metrics").text:
                assert not answer.done()
            process.send_signal(signal.SIGTERM)
            while _is_listening(url):
                assert not answer.done()
            process.send_signal(signal.SIGTERM)
            text = answer.result(WAIT_S).text
        assert json.loads(text.split("data: ")[-1])["error"]["code"] == "engine_failure"
        assert process.wait(WAIT_S) == 0
        assert process.stderr.read() == ""


def _is_listening(url: str) -> bool:
    try:
        httpx.get(f"{url}/live", timeout=WAIT_S)
    except httpx.TransportError:
        return False
    return True


def test_answers_that_outlast_the_patience_end_with_an_error(make_service: MakeService) -> None:
    services = {"bytes": make_service(script=endless, gate=threading.Semaphore(1))}
    config = ServerConfig(shutdown_timeout_s=0.05)
    body = {"model": "bytes", "prompt": "x", "stream": True}
    with httpx.Client(timeout=WAIT_S) as client, ThreadPoolExecutor(1) as pool:
        with serving(services, config) as address:
            request = client.build_request("POST", f"{base_url(address)}/completions", json=body)
            response = client.send(request, stream=True)
            answer = pool.submit(response.read)
        text = answer.result(WAIT_S).decode()
    assert json.loads(text.split("data: ")[-1])["error"]["code"] == "engine_failure"


def test_it_listens_before_the_model_is_loaded(make_service: MakeService) -> None:
    may_load, listening = threading.Event(), threading.Event()
    ports: list[int] = []

    def load() -> Service:
        assert may_load.wait(WAIT_S)
        raise UnsupportedModel("the architecture 'x' is not known")

    def note(host: str, port: int) -> None:
        ports.append(port)
        listening.set()

    failures: list[BaseException] = []

    def run() -> None:
        try:
            serve_loading({"x": load}, ServerConfig(port=0), note)
        except UnsupportedModel as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert listening.wait(WAIT_S)
    with httpx.Client(base_url=f"http://127.0.0.1:{ports[0]}", timeout=WAIT_S) as client:
        assert client.get("/live").status_code == 200
        assert client.get("/ready").json()["problems"] == {"x": "loading"}
        assert client.get("/v1/models").json()["data"] == []
    may_load.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert len(failures) == 1


def test_a_busy_port_is_an_error_with_advice(make_service: MakeService) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = ServerConfig(port=taken.getsockname()[1])
        with pytest.raises(InvalidRequest, match="--port"):
            serve({"bytes": make_service()}, config)
