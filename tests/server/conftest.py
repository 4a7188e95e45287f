"""Services over a fake engine, and everything closed afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from byte_model import byte_model
from fake_engine import FakeEngine

from headrace.config import ServerConfig
from headrace.service import Service

MakeService = Callable[..., Service]


@pytest.fixture
def make_service() -> Iterator[MakeService]:
    """`make_service(limits, **fields of FakeEngine)` is a service; closed at the end."""
    made: list[Service] = []

    def make(limits: ServerConfig | None = None, **fields: Any) -> Service:
        service = Service(byte_model(), FakeEngine(**fields), limits)
        made.append(service)
        return service

    yield make
    for service in made:
        service.close()
