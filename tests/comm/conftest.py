"""Pairs of endpoints of one process, and a registry for several."""

from pathlib import Path

import pytest

from rlinf.comm import (
    CommConfig,
    Endpoint,
    MemoryRegistry,
    RegistryServer,
)

TRANSPORTS = ["inproc", "tcp", "shm"]


@pytest.fixture(params=TRANSPORTS)
def config(request):
    return CommConfig(backend_priority=(request.param,))


@pytest.fixture
def pair(config):
    registry = MemoryRegistry()
    with (
        Endpoint("a/0", registry=registry, config=config) as a,
        Endpoint("b/0", registry=registry, config=config) as b,
    ):
        yield a, b


@pytest.fixture
def inproc():
    registry = MemoryRegistry()
    with Endpoint("a/0", registry=registry) as a, Endpoint("b/0", registry=registry) as b:
        yield a, b


@pytest.fixture
def registry():
    with RegistryServer() as server:
        yield server


def descriptors_open():
    return len(list(Path("/proc/self/fd").iterdir()))
