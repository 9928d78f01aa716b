"""A channel between two endpoints of this process; modules with other rigs have their own."""

from collections.abc import Iterator

import pytest

from rlinf.channel import (
    Channel,
    ChannelServer,
)
from rlinf.channel.testing import Rig
from rlinf.comm import Endpoint


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig("inproc") as rig:
        yield rig


@pytest.fixture(scope="module")
def server(rig: Rig) -> Iterator[ChannelServer]:
    with rig.server() as server:
        yield server


@pytest.fixture
def here(rig: Rig, server: ChannelServer) -> Iterator[Endpoint]:
    with rig.endpoint("here/0") as endpoint:
        yield endpoint


@pytest.fixture
def there(rig: Rig, server: ChannelServer) -> Iterator[Endpoint]:
    with rig.endpoint("there/0") as endpoint:
        yield endpoint


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return request.node.name


@pytest.fixture
def channel(name: str, here: Endpoint) -> Channel:
    return Channel.create(name, here)


@pytest.fixture
def other(channel: Channel, there: Endpoint) -> Channel:
    return channel.ref.open(there)
