"""rlinf.comm: send any object between named processes, over the best transport there is.

    with RegistryServer() as registry, Endpoint("trainer/0", registry=registry) as me:
        me.send(batch, to="rollout/3")
        reply = me.recv(source="rollout/3")

Names are loaded on first use, so that importing this package is quick and does nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf.comm.accelerator import local_device
    from rlinf.comm.address import Address, WorkerId
    from rlinf.comm.codec import Coded, Parcel, join, split
    from rlinf.comm.config import CommConfig
    from rlinf.comm.device import Device, Locality, locality
    from rlinf.comm.endpoint import Endpoint, EndpointStatistics
    from rlinf.comm.errors import (
        AuthenticationError,
        Cancelled,
        CodecError,
        CommError,
        ConfigError,
        ConnectTimeout,
        EndpointClosed,
        ForkedProcess,
        MessageMismatch,
        NoTransport,
        PeerLost,
        PoolExhausted,
        ProtocolError,
        RemoteError,
        ServiceUnknown,
        StaleEpoch,
        Timeout,
        UnknownWorker,
    )
    from rlinf.comm.events import (
        ChromeTraceSink,
        Closing,
        Connected,
        Disconnected,
        Event,
        Lost,
        Received,
        Sent,
        Sink,
    )
    from rlinf.comm.group import Group
    from rlinf.comm.handle import DEFAULT, Handle, wait_all
    from rlinf.comm.mailbox import ANY
    from rlinf.comm.registry import MemoryRegistry, Registry, WorkerRecord
    from rlinf.comm.registry_server import RegistryClient, RegistryServer
    from rlinf.comm.request import Request
    from rlinf.comm.selection import Choice, choose

__all__ = [
    "ANY",
    "Address",
    "AuthenticationError",
    "Cancelled",
    "Choice",
    "ChromeTraceSink",
    "Closing",
    "CodecError",
    "Coded",
    "CommConfig",
    "CommError",
    "ConfigError",
    "ConnectTimeout",
    "Connected",
    "DEFAULT",
    "Device",
    "Disconnected",
    "Endpoint",
    "EndpointClosed",
    "EndpointStatistics",
    "Event",
    "ForkedProcess",
    "Group",
    "Handle",
    "Locality",
    "Lost",
    "MemoryRegistry",
    "MessageMismatch",
    "NoTransport",
    "Parcel",
    "PeerLost",
    "PoolExhausted",
    "ProtocolError",
    "Received",
    "Registry",
    "RegistryClient",
    "RegistryServer",
    "RemoteError",
    "Request",
    "Sent",
    "ServiceUnknown",
    "Sink",
    "StaleEpoch",
    "Timeout",
    "UnknownWorker",
    "WorkerId",
    "WorkerRecord",
    "choose",
    "join",
    "local_device",
    "locality",
    "split",
    "wait_all",
]

_MODULES = {
    "accelerator": ("local_device",),
    "address": ("Address", "WorkerId"),
    "codec": ("Coded", "Parcel", "join", "split"),
    "config": ("CommConfig",),
    "device": ("Device", "Locality", "locality"),
    "endpoint": ("Endpoint", "EndpointStatistics"),
    "events": (
        "ChromeTraceSink",
        "Closing",
        "Connected",
        "Disconnected",
        "Event",
        "Lost",
        "Received",
        "Sent",
        "Sink",
    ),
    "group": ("Group",),
    "handle": ("DEFAULT", "Handle", "wait_all"),
    "mailbox": ("ANY",),
    "registry": ("MemoryRegistry", "Registry", "WorkerRecord"),
    "registry_server": ("RegistryClient", "RegistryServer"),
    "request": ("Request",),
    "selection": ("Choice", "choose"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_HOME.get(name, 'errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
