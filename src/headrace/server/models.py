"""The models a server offers, some of them still loading, and whether they can generate.

Not a loader: whoever loads puts a `Service` in. Healthy means that a token was generated while we
looked, by anyone: a probe of one token joins the batch like any request, and on a full engine the
progress of others is proof enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.errors import HeadraceError, ModelLoading, ModelNotFound, Overloaded
from headrace.observe import unix_time_s
from headrace.server.metrics import Metrics
from headrace.service import Service

# How often progress is looked at while a probe waits; stats are cheap.
_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Entry:
    """One served model and when it became ready (Unix seconds)."""

    service: Service
    created: int


class ModelTable:
    """Names to services. `put` may be called from a loading thread; entries never leave."""

    def __init__(self, names: Iterable[str], metrics: Metrics) -> None:
        self.names = tuple(names)
        self.metrics = metrics
        self._entries: dict[str, Entry] = {}

    def put(self, name: str, service: Service) -> None:
        """A model is loaded: requests for it are accepted from now on."""
        assert name in self.names, f"{name} was not announced"
        service.attach(self.metrics)
        self._entries[name] = Entry(service, unix_time_s())

    @property
    def loaded(self) -> Mapping[str, Entry]:
        """What is ready now."""
        return dict(self._entries)

    def get(self, name: str) -> Entry:
        """The entry of a model. **Raises** `ModelNotFound`, `ModelLoading`."""
        entry = self._entries.get(name)
        if entry is not None:
            return entry
        if name in self.names:
            raise ModelLoading(f"{name} is still loading; try again in a few seconds")
        served = ", ".join(self.names) or "none"
        raise ModelNotFound(
            f"the model {name[:200]!r} is not served here; served: {served}", param="model"
        )


class Prober:
    """Answers "can a token be generated?"; simultaneous questions share one probe."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._running: dict[str, asyncio.Task[str | None]] = {}

    async def problem(self, service: Service) -> str | None:
        """None when the model can generate, otherwise why not."""
        name = service.model.name
        task = self._running.get(name)
        if task is None:
            task = asyncio.create_task(self._look(service))
            self._running[name] = task
            task.add_done_callback(lambda _: self._running.pop(name, None))
        return await asyncio.shield(task)

    async def _look(self, service: Service) -> str | None:
        before = service.stats().generated_tokens
        probe = asyncio.create_task(service.probe())
        try:
            async with asyncio.timeout(self._timeout_s):
                while service.stats().generated_tokens == before:
                    if probe.done() and not isinstance(probe.exception(), Overloaded):
                        break
                    await _pause(probe)
            if probe.done() and not isinstance(probe.exception(), Overloaded):
                probe.result()
        except TimeoutError:
            return f"no token within {self._timeout_s:g} s"
        except HeadraceError as error:
            return error.message
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
        return None


async def _pause(probe: asyncio.Task[None]) -> None:
    if probe.done():
        await asyncio.sleep(_LOOK_EVERY_S)
    else:
        await asyncio.wait({probe}, timeout=_LOOK_EVERY_S)
