"""The end of a server: open answers may finish for a while, the rest hear why they end.

uvicorn stops listening and waits for its connections; left alone it would then cancel their tasks,
which clients see as a cut stream or a bare 500. Here the engines are closed before that, so every
open answer ends as any failed one does: with the dialect's error object. A second signal does not
wait; a third Ctrl-C is uvicorn's own way out.
"""

from __future__ import annotations

import asyncio
import socket
from types import FrameType

import uvicorn

from headrace.server.models import ModelTable

# From the closing of the engines to uvicorn's cancelling: time to send the last words.
LAST_WORDS_S = 10
_LOOK_EVERY_S = 0.05


class Server(uvicorn.Server):
    """A uvicorn server over a table of models. `patience_s`: how long open answers may go on."""

    def __init__(self, config: uvicorn.Config, table: ModelTable, patience_s: float) -> None:
        super().__init__(config)
        self._table = table
        self._patience_s = patience_s
        self._is_hurried = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first ends the server, the second also its open answers."""
        if self.should_exit and not self._is_hurried:
            self._is_hurried = True
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by uvicorn once it should exit."""
        ending = asyncio.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    async def _end_answers(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._patience_s
        while loop.time() < deadline and not self._is_hurried:
            await asyncio.sleep(_LOOK_EVERY_S)
        for entry in self._table.loaded.values():
            await asyncio.to_thread(entry.service.close)
