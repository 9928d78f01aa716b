"""Which transport to take between two workers: a table, read from the top. No I/O."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rlinf.comm.address import WorkerId
from rlinf.comm.device import Locality, Located, locality
from rlinf.comm.errors import ConfigError, NoTransport


class Party(Located, Protocol):
    """What `choose` looks at; a WorkerRecord is one."""

    @property
    def id(self) -> WorkerId:
        """The worker's name, for messages."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The winner and why, in a sentence fit for a log."""

    transport: str
    because: str


@dataclass(frozen=True, slots=True)
class Row:
    """One situation, and what to take in it, best first.

    Attributes:
        localities: Where it applies.
        kind: Device kind both workers must have; None: any, or different ones.
        transports: Names of transports, best first.
        situation: The situation in words.
    """

    localities: frozenset[Locality]
    kind: str | None
    transports: tuple[str, ...]
    situation: str


@dataclass(frozen=True, slots=True)
class Vendor:
    """What moves memory between devices of one kind.

    Attributes:
        kind: As `Device.kind`.
        collective: The transport over the vendor's communication library.
        ipc: The transport that maps another process's device memory; None where there is none.
    """

    kind: str
    collective: str
    ipc: str | None = None


VENDORS: tuple[Vendor, ...] = (
    Vendor("cuda", "nccl", "cuda_ipc"),
    Vendor("rocm", "rccl"),
    Vendor("xpu", "xccl"),
    Vendor("npu", "hccl"),
    Vendor("musa", "mccl"),
)
"""A new kind of device is a row here and a transport of that name, which may be a plug-in."""

_PROCESS = frozenset({Locality.SAME_PROCESS})
_DEVICE = frozenset({Locality.SAME_DEVICE})
_HOST = frozenset({Locality.SAME_HOST})
_NEAR = _DEVICE | _HOST
_REMOTE = frozenset({Locality.REMOTE})
_BY_MEMORY = ("shm", "tcp", "streams", "gloo")
_BY_NETWORK = ("streams", "tcp", "gloo")


def _rows(vendor: Vendor) -> tuple[Row, ...]:
    kind = vendor.kind
    ipc = () if vendor.ipc is None else (vendor.ipc,)
    return (
        Row(_DEVICE, kind, (*ipc, *_BY_MEMORY), f"both use the same {kind} device"),
        Row(
            _HOST,
            kind,
            (vendor.collective, *ipc, *_BY_MEMORY),
            f"both are on one host and use different {kind} devices",
        ),
        Row(
            _REMOTE,
            kind,
            (vendor.collective, *_BY_NETWORK),
            f"they are on different hosts with {kind} devices",
        ),
    )


TABLE: tuple[Row, ...] = (
    Row(_PROCESS, None, ("inproc", *_BY_MEMORY), "both are in the same process"),
    *(row for vendor in VENDORS for row in _rows(vendor)),
    Row(_NEAR, None, _BY_MEMORY, "both are on one host and meet in its memory"),
    Row(_REMOTE, None, _BY_NETWORK, "they are on different hosts"),
)

NAMES: tuple[str, ...] = tuple(sorted({name for row in TABLE for name in row.transports}))


def row_for(local: Party, remote: Party) -> Row:
    """The first row of `TABLE` that applies to the two."""
    near = locality(local, remote)
    kind = local.device.kind if local.device.kind == remote.device.kind else None
    return next(row for row in TABLE if near in row.localities and row.kind in (None, kind))


def choose(
    local: Party,
    remote: Party,
    available: Collection[str],
    priority: Iterable[str] = (),
    unavailable: Mapping[str, str] | None = None,
) -> Choice:
    """Choose the transport from `local` to `remote`.

    Args:
        local: Who connects.
        remote: To whom.
        available: Names of the transports that both sides can use.
        priority: Names to prefer over the table, in order. One that is not available, or which
            the table knows but not for this situation, is passed over.
        unavailable: Why a transport is missing from `available`, in words, for the messages.

    Raises:
        ConfigError: `priority` names a transport that is neither in the table nor available.
        NoTransport: Nothing available reaches `remote`; the message says why, one by one.
    """
    reasons = unavailable or {}
    row = row_for(local, remote)
    for name in priority:
        _check_known(name, available, reasons)
        if name in available and (name in row.transports or name not in NAMES):
            return Choice(name, f"{name}: preferred by backend_priority; {row.situation}")
    passed: list[str] = []
    for name in row.transports:
        if name in available:
            because = f"{name}: {row.situation}"
            if passed:
                because += f"; better but missing: {', '.join(passed)}"
            return Choice(name, because)
        passed.append(f"{name} ({reasons.get(name, 'not available')})")
    raise NoTransport(
        f"no transport from {local.id} to {remote.id}: {row.situation}, which {len(passed)} could "
        f"serve, but all are missing: {', '.join(passed)}; available to both are "
        f"{_listed(available)}. Install one, or let both sides listen on it.",
        peer=remote.id,
    )


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none at all"


def _check_known(name: str, available: Collection[str], reasons: Mapping[str, str]) -> None:
    known = sorted({*NAMES, *available, *reasons})
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise ConfigError(
            f"backend_priority names {name!r}, which is no transport; did you mean {near[0]!r}? "
            f"Known are {', '.join(known)}"
        )
