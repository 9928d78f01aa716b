"""Weights on their way from a trainer to rollouts: versions, fingerprints, all or nothing.

The trainer publishes a version: a snapshot of the weights, in memory that is sent without another
copy. Receivers fetch it, whenever they are ready, from a service that the trainer's dispatching
thread answers; so a restarted receiver gets the current version while the trainer is busy, and on
one host all receivers read the same memory. A receiver says what it has and is sent only the
tensors that differ: all of them after a restart, the trained ones after a step.

Both sides fingerprint the bytes. What does not match is refused before a parameter is touched, so
the old version goes on serving and a fetch can simply be repeated.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rlinf.comm import DEFAULT, Endpoint, Request, WorkerId
from rlinf.comm.handle import TimeoutLike
from rlinf.workers.errors import WorkerError
from rlinf.workers.fingerprint import combined, marks_of

__all__ = [
    "Published",
    "WeightPublisher",
    "WeightReceiver",
    "WeightTarget",
    "WeightsCorrupt",
    "WeightsUnchanged",
    "WeightsUnknown",
]

SERVICE = "weights"


class WeightsUnknown(WorkerError):
    """The trainer has published nothing yet, or not that version."""

    FIELDS = ("wanted", "latest")


class WeightsUnchanged(WorkerError):
    """A new version has the bytes of the one before, or one version has two contents."""

    FIELDS = ("version", "fingerprint")


class WeightsCorrupt(WorkerError):
    """What arrived, or what is served after loading it, is not what was published."""

    FIELDS = ("version", "expected", "found")


@dataclass(frozen=True, slots=True)
class Published:
    """A version of the weights.

    Attributes:
        version: Its number.
        fingerprint: Of all tensors together.
        marks: The fingerprint of each tensor.
        state: Those tensors that are asked for: a snapshot which nobody changes.
    """

    version: int
    fingerprint: str
    marks: Mapping[str, str] = field(repr=False)
    state: Mapping[str, Tensor] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a receiver asks for: `version` or a newer one (None: any), beyond the marks it has."""

    version: int | None
    marks: Mapping[str, str]


class WeightTarget(Protocol):
    """What weights are loaded into."""

    @property
    def version(self) -> int:
        """The version that is serving."""

    def state(self) -> Mapping[str, Tensor]:
        """The weights that are serving, as far as they lie in this process."""

    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copy the tensors in place, all or none of them, and serve them as this version."""


class WeightPublisher:
    """The trainer's side. Serves "weights" on `endpoint` from now on."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._latest: Published | None = None
        endpoint.serve(SERVICE, self._answer)

    def publish(self, state: Mapping[str, Tensor], version: int) -> Published:
        """Make a snapshot of `state` the latest version. Publishing it again changes nothing.

        Memory is needed for the tensors that changed only. When it fails the version before stays
        the latest one.

        Raises:
            WeightsUnchanged: The version grew but not a byte is different (the optimiser's step did
                not reach these weights), or the same version now has other bytes.
        """
        marks, last = marks_of(state), self._latest
        mark = combined(marks)
        if last is not None and (version > last.version) == (mark == last.fingerprint):
            raise WeightsUnchanged(
                f"weights of version {version} have the fingerprint {mark}, and version "
                f"{last.version} before them {last.fingerprint}: a step must change the weights, "
                "and only a step may",
                version=version,
                fingerprint=mark,
            )
        if last is not None and version <= last.version:
            return last
        latest = Published(version, mark, marks, self._snapshot(state, marks, last))
        with self._lock:
            self._latest = latest
        return latest

    def forget(self) -> None:
        """Offer nothing until the next `publish`: the trainer has gone back to older weights."""
        with self._lock:
            self._latest = None

    def _snapshot(
        self, state: Mapping[str, Tensor], marks: Mapping[str, str], last: Published | None
    ) -> Mapping[str, Tensor]:
        """Copies of the tensors; those that are as they were keep their copy."""
        kept: dict[str, Tensor] = {}
        if last is not None:
            kept = {n: t for n, t in last.state.items() if last.marks[n] == marks.get(n)}
        return {n: kept[n] if n in kept else self._copy(t) for n, t in state.items()}

    def _copy(self, tensor: Tensor) -> Tensor:
        copy: Tensor = self._endpoint.empty(tuple(tensor.shape), tensor.dtype)
        with torch.no_grad():
            copy.copy_(tensor)
        return copy

    def _answer(self, request: Request) -> None:
        wanted: Wanted = request.payload
        with self._lock:
            latest = self._latest
        if latest is None or (wanted.version is not None and latest.version < wanted.version):
            have = "nothing" if latest is None else f"version {latest.version}"
            asked = "weights" if wanted.version is None else f"version {wanted.version}"
            text = f"{self._endpoint.id} has published {have}; {request.source} asked for {asked}"
            known = None if latest is None else latest.version
            request.fail(WeightsUnknown(text, wanted=wanted.version, latest=known))
            return
        marks = latest.marks
        missing = {n: t for n, t in latest.state.items() if wanted.marks.get(n) != marks[n]}
        request.reply(Published(latest.version, latest.fingerprint, marks, missing))


class WeightReceiver:
    """A rollout's side: brings `target` to a version of the trainer's."""

    def __init__(self, endpoint: Endpoint, target: WeightTarget) -> None:
        self._endpoint, self._target = endpoint, target
        self._marks: Mapping[str, str] = {}

    @property
    def fingerprint(self) -> str:
        """Of the weights that were fetched last; empty before."""
        return combined(self._marks) if self._marks else ""

    def fetch(
        self, trainer: str | WorkerId, version: int | None = None, timeout: TimeoutLike = DEFAULT
    ) -> Published:
        """Load the trainer's latest weights, which must be `version` or newer.

        Raises:
            WeightsUnknown: It has not published that version.
            WeightsCorrupt: The bytes that arrived are not those that were published.
            rlinf.comm.CommError: The trainer could not be reached in time.
        """
        wanted = Wanted(version, self._marks)
        answer = self._endpoint.call(SERVICE, wanted, to=trainer, timeout=timeout)
        latest = answer.result(timeout)
        if not isinstance(latest, Published):
            raise WeightsCorrupt(f"{trainer} answered {type(latest).__name__} in place of weights")
        self._check(latest, str(trainer))
        # Until all of it is known to be served, nothing is: after a failure all is sent again.
        self._marks = {}
        self._target.load_state(latest.state, latest.version)
        self._check_served(latest)
        self._marks = latest.marks
        return latest

    def _check(self, latest: Published, trainer: str) -> None:
        """What arrived is what was published, and with what is here it is the whole version."""
        arrived = marks_of(latest.state)
        found = combined({n: arrived.get(n, self._marks.get(n, "")) for n in latest.marks})
        if found != latest.fingerprint:
            raise WeightsCorrupt(
                f"version {latest.version} from {trainer} arrived with the fingerprint {found} in "
                f"place of {latest.fingerprint}; fetch it again",
                version=latest.version,
                expected=latest.fingerprint,
                found=found,
            )

    def _check_served(self, latest: Published) -> None:
        """The engine serves what it was given, in its own dtype."""
        serving = self._target.state()
        for name, value in latest.state.items():
            if name not in serving:
                continue
            served = serving[name]
            if not torch.equal(served, value.to(served.device, served.dtype)):
                raise WeightsCorrupt(
                    f"{self._endpoint.id} loaded version {latest.version}, but its engine still "
                    f"serves another {name}: it must copy weights in place, into the tensors that "
                    "it computes with",
                    version=latest.version,
                )
