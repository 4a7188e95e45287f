"""A model hub on the loopback: enough of the API for huggingface_hub to list and fetch files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "owner/repo"


@dataclass
class Hub:
    """What the hub holds; `broken` files answer 403, `sums` override the sums it states."""

    files: dict[str, bytes]
    broken: set[str] = field(default_factory=set)
    sums: dict[str, str] = field(default_factory=dict)
    served: list[str] = field(default_factory=list)

    def listing(self) -> dict[str, Any]:
        siblings = [
            {"rfilename": name, "size": len(data), "lfs": self._lfs(name, data)}
            for name, data in self.files.items()
        ]
        return {
            "id": REPO,
            "modelId": REPO,
            "sha": COMMIT,
            "private": False,
            "disabled": False,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "cardData": {"license": "mit"},
            "siblings": siblings,
        }

    def _lfs(self, name: str, data: bytes) -> Mapping[str, Any]:
        sha256 = self.sums.get(name, hashlib.sha256(data).hexdigest())
        return {"sha256": sha256, "size": len(data), "pointerSize": 134}


@contextmanager
def serve_hub(hub: Hub) -> Iterator[str]:
    """The hub's address while the context lasts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            prefix = f"/{REPO}/resolve/{COMMIT}/"
            if path == f"/api/models/{REPO}":
                self._send(200, json.dumps(hub.listing()).encode(), {})
            elif path.startswith(prefix) and path[len(prefix) :] in hub.files:
                self._send_file(path[len(prefix) :])
            else:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET  # noqa: N815 (the base class's spelling)

        def _send_file(self, name: str) -> None:
            if name in hub.broken:
                self._send(403, b"", {})
                return
            if self.command == "GET":
                hub.served.append(name)
            data = hub.files[name]
            etag = hashlib.sha1(data).hexdigest()
            self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})

        def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
