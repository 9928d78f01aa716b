"""Channels between workers, and the device lock: load-balanced, acknowledged, bounded.

A `ChannelServer` hosts both on an endpoint; `Channel` and `DeviceLock` are what workers use.
"""

from rlinf.channel.channel import Channel, ChannelRef
from rlinf.channel.config import ChannelConfig, SpoolConfig
from rlinf.channel.dead import DeadLetter
from rlinf.channel.errors import (
    ChannelBusy,
    ChannelClosed,
    ChannelError,
    ChannelUnknown,
    ConfigMismatch,
    Full,
    InvalidConfig,
    InvalidWeight,
    ItemsLost,
    ItemTooLarge,
    LeaseLost,
    LockTimeout,
    PolicyUnknown,
    ServerLost,
    SpoolFailed,
    SpoolFull,
    SpoolUnusable,
    Standstill,
    Timeout,
)
from rlinf.channel.job import Job, announce, running_jobs
from rlinf.channel.lease import Lease
from rlinf.channel.lock import DeviceLock, Grant, Residency
from rlinf.channel.policy import Choice, ConsumerLoad, ItemLoad, Policy
from rlinf.channel.server import ChannelServer
from rlinf.channel.statistics import (
    ChannelStatistics,
    ConsumerStatistics,
    Holder,
    LockStatistics,
    ServerStatistics,
    Waiting,
)

__all__ = [
    "Channel",
    "ChannelBusy",
    "ChannelClosed",
    "ChannelConfig",
    "ChannelError",
    "ChannelRef",
    "ChannelServer",
    "ChannelStatistics",
    "ChannelUnknown",
    "Choice",
    "ConfigMismatch",
    "ConsumerLoad",
    "ConsumerStatistics",
    "DeadLetter",
    "DeviceLock",
    "Full",
    "Grant",
    "Holder",
    "InvalidConfig",
    "InvalidWeight",
    "ItemLoad",
    "ItemTooLarge",
    "ItemsLost",
    "Job",
    "Lease",
    "LeaseLost",
    "LockStatistics",
    "LockTimeout",
    "Policy",
    "PolicyUnknown",
    "Residency",
    "ServerLost",
    "ServerStatistics",
    "SpoolConfig",
    "SpoolFailed",
    "SpoolFull",
    "SpoolUnusable",
    "Standstill",
    "Timeout",
    "Waiting",
    "announce",
    "running_jobs",
]
