"""Configuration of a channel: what a YAML file may say and what it means."""

import difflib
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

from rlinf.channel.errors import InvalidConfig

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")
_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


@lru_cache(maxsize=256)
def parse_bytes(size: int | str) -> int:
    """Bytes named by a number or by text such as ``"10GB"`` (1000s) or ``"10GiB"`` (1024s)."""
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise InvalidConfig(f"a size is a number of bytes or text like '10GB', not {size!r}")
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InvalidConfig(f"cannot read the size {size!r}; write it like 512MB, 10GB or 8GiB")
    return round(float(match[1]) * factor)


CACHE_RATIO = "RLINF_GPU_CACHE_RATIO"


def gpu_cache_ratio() -> float:
    """The share of its budget that a device cache uses, from the environment."""
    text = os.environ.get(CACHE_RATIO, "0.8")
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 < ratio <= 1:
        raise InvalidConfig(f"{CACHE_RATIO} must be above 0 and at most 1, not {text!r}")
    return ratio


SYNCS = ("process", "disk")


@dataclass(frozen=True, slots=True)
class SpoolConfig:
    """Where a server keeps what it has acknowledged, so that a restart goes on with it."""

    folder: str
    """Made if need be. One server at a time uses it."""
    sync: str = "process"
    """What an acknowledged item survives. process: the death of the server's process, because it
    was handed to the operating system. disk: also that of the host, because every write waits for
    the disk (`fdatasync`)."""
    tidy_bytes: int | str = "64MB"
    """The log is written anew when it has this size, and three times that after the last time."""

    def __post_init__(self) -> None:
        if self.sync not in SYNCS:
            raise InvalidConfig(f"sync of a spool is one of {', '.join(SYNCS)}, not {self.sync!r}")
        if parse_bytes(self.tidy_bytes) <= 0:
            raise InvalidConfig(f"tidy_bytes must be above 0, not {self.tidy_bytes!r}")

    @property
    def tidy_size(self) -> int:
        """`tidy_bytes` in bytes."""
        return parse_bytes(self.tidy_bytes)


def runtime_folder() -> Path:
    """Where running jobs are announced: in `XDG_RUNTIME_DIR`, or in tmp; this user's alone."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "rlinf"
    return Path(tempfile.gettempdir()) / f"rlinf-{os.getuid()}"


def registry_token() -> str:
    """`RLINF_TOKEN`: the token of a registry that is named by its address. Empty: none given."""
    return os.environ.get("RLINF_TOKEN", "")


@dataclass(frozen=True, slots=True)
class ChannelConfig:
    """How one channel behaves. Equal configurations connect; unequal ones are an error."""

    type: str = "weighted"
    """Balancing policy among consumers: weighted, round_robin, least_loaded, adaptive, or the
    name of an entry point in the group ``rlinf.policies``."""
    buffer_size: int | str = "4GB"
    """Most bytes the channel holds, queued and leased together; more makes producers wait."""
    max_items: int | None = None
    """Most items queued (leased ones do not count); None leaves the bound to the bytes."""
    lease_s: float = 30.0
    """Seconds without a sign of life after which a consumer's items go back to the queue. A
    living consumer renews by itself, however long it computes."""
    max_deliveries: int | None = 10
    """An item that was given out so often and never acknowledged is kept aside as a dead letter, so
    that one which kills its consumers does not go round for ever. Half as often given back, it is
    given out alone, however large a batch was asked for. None: for ever."""
    reconnect_s: float = 30.0
    """Seconds for which producers and consumers wait for a server that died to come back under its
    name; then they raise `ServerLost`. 0: at once. A server that was closed is not waited for."""
    put_window_items: int = 8192
    """Items a producer may have on their way, not yet acknowledged; 0: each put waits."""
    put_window_bytes: int | str = "32MB"
    """Bytes a producer may have on their way, not yet acknowledged."""
    prefetch_items: int = 8192
    """Most items one get may bring along for the next ones; 1 turns prefetching off."""
    prefetch_s: float = 0.002
    """Only so many items are brought along as the consumer, at its recent pace, uses in this
    time. A slow consumer therefore holds nothing that another could work on."""
    offload_to_cpu: bool = True
    """Items wait in host memory. False: those with tensors on an accelerator stay there, in the
    process which put them, as long as they fit, and end with that process."""
    device_cache: int | str | None = None
    """Device memory a producer may keep items in, of which `RLINF_GPU_CACHE_RATIO` (0.8 unless set)
    is used; None: what is free at the first put. What is needed last goes to the host."""
    host_cache: int | str | None = None
    """Host memory for what has no room on the device; None: no bound of its own."""
    cache_folder: str | None = None
    """Where a producer keeps what has no room on the host either; None: it stays on the host."""

    def __post_init__(self) -> None:
        for name in ("buffer_size", "put_window_bytes"):
            if parse_bytes(getattr(self, name)) <= 0:
                raise InvalidConfig(f"{name} must be above 0 bytes, not {getattr(self, name)!r}")
        if self.max_items is not None and self.max_items < 1:
            raise InvalidConfig(f"max_items must be at least 1 or None, not {self.max_items!r}")
        if not self.lease_s > 0:
            raise InvalidConfig(f"lease_s must be above 0, not {self.lease_s!r}")
        if self.max_deliveries is not None and self.max_deliveries < 1:
            raise InvalidConfig(
                f"max_deliveries must be at least 1 or None, not {self.max_deliveries!r}"
            )
        if not self.reconnect_s >= 0:
            raise InvalidConfig(f"reconnect_s must be at least 0, not {self.reconnect_s!r}")
        if self.put_window_items < 0 or self.prefetch_items < 1 or not self.prefetch_s >= 0:
            raise InvalidConfig(
                "put_window_items and prefetch_s are at least 0 and prefetch_items at least 1, not "
                f"{self.put_window_items!r}, {self.prefetch_s!r}, {self.prefetch_items!r}"
            )
        for name in ("device_cache", "host_cache"):
            size = getattr(self, name)
            if size is not None and parse_bytes(size) <= 0:
                raise InvalidConfig(f"{name} must be above 0 bytes or None, not {size!r}")

    @property
    def buffer_bytes(self) -> int:
        """`buffer_size` in bytes."""
        return parse_bytes(self.buffer_size)

    @property
    def window_bytes(self) -> int:
        """`put_window_bytes` in bytes."""
        return parse_bytes(self.put_window_bytes)

    @property
    def host_cache_bytes(self) -> int | None:
        """`host_cache` in bytes."""
        return None if self.host_cache is None else parse_bytes(self.host_cache)

    def device_cache_bytes(self, free_bytes: int) -> int:
        """What a producer may use of the device, of which so much is free."""
        budget = free_bytes if self.device_cache is None else parse_bytes(self.device_cache)
        return int(budget * gpu_cache_ratio())

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> "ChannelConfig":
        """Read one entry of a YAML ``channels:`` section; an unknown key names the nearest."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean '{near[0]}'?" if near else ""
                raise InvalidConfig(
                    f"unknown channel setting '{key}'{hint} (known: {', '.join(known)})"
                )
        return cls(**values)  # type: ignore[arg-type]

    def differences(self, other: "ChannelConfig") -> str:
        """The settings in which two configurations differ, for an error message."""
        pairs = (
            (f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(type(self))
        )
        return ", ".join(
            f"{name}: {mine!r} here, {theirs!r} there"
            for name, mine, theirs in pairs
            if mine != theirs
        )
