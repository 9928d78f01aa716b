"""Weights on their way from a trainer to rollouts: versions, fingerprints, all or nothing.

The trainer publishes a version: one copy of the weights, in memory that is sent without another.
Receivers fetch it, whenever they are ready, from a service that the trainer's dispatching thread
answers; so a restarted receiver gets the current version while the trainer is busy, and on one
host all receivers read the same copy. Both sides fingerprint the bytes. What does not match is
refused before a parameter is touched, so the old version goes on serving and a fetch can simply be
repeated.
"""

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rlinf.comm import DEFAULT, Endpoint, Request, WorkerId
from rlinf.comm.handle import TimeoutLike
from rlinf.workers.errors import WorkerError

__all__ = [
    "Published",
    "WeightPublisher",
    "WeightReceiver",
    "WeightTarget",
    "WeightsCorrupt",
    "WeightsUnchanged",
    "WeightsUnknown",
    "fingerprint",
]

SERVICE = "weights"


class WeightsUnknown(WorkerError):
    """The trainer has published nothing yet, or not that version."""

    FIELDS = ("wanted", "latest")


class WeightsUnchanged(WorkerError):
    """A new version has the bytes of the one before, or one version has two contents."""

    FIELDS = ("version", "fingerprint")


class WeightsCorrupt(WorkerError):
    """What arrived is not what was published. The old version goes on serving."""

    FIELDS = ("version", "expected", "found")


@dataclass(frozen=True, slots=True)
class Published:
    """A version of the weights. `state` is a snapshot which nobody changes."""

    version: int
    fingerprint: str
    state: Mapping[str, Tensor] = field(repr=False)


class WeightTarget(Protocol):
    """What weights are loaded into."""

    @property
    def version(self) -> int:
        """The version that is serving."""

    def load_state(self, state: Mapping[str, Tensor], version: int) -> None:
        """Copy the tensors in place, all or none of them."""


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """A hash of the names, dtypes, shapes and bytes; the order of the names does not matter."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(state):
        tensor = state[name].detach().cpu()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class WeightPublisher:
    """The trainer's side. Serves "weights" on `endpoint` from now on."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._latest: Published | None = None
        endpoint.serve(SERVICE, self._answer)

    def publish(self, state: Mapping[str, Tensor], version: int) -> Published:
        """Make a snapshot of `state` the latest version. Publishing it again changes nothing.

        Raises:
            WeightsUnchanged: The version grew but not a byte is different (the optimiser's step did
                not reach these weights), or the same version now has other bytes.
        """
        mark, last = fingerprint(state), self._latest
        if last is not None and (version > last.version) == (mark == last.fingerprint):
            raise WeightsUnchanged(
                f"weights of version {version} have the fingerprint {mark}, and version "
                f"{last.version} before them {last.fingerprint}: a step must change the weights, "
                "and only a step may",
                version=version,
                fingerprint=mark,
            )
        if last is None or version > last.version:
            last = Published(version, mark, {n: self._copy(t) for n, t in state.items()})
            with self._lock:
                self._latest = last
        return last

    def _copy(self, tensor: Tensor) -> Tensor:
        copy: Tensor = self._endpoint.empty(tuple(tensor.shape), tensor.dtype)
        with torch.no_grad():
            copy.copy_(tensor)
        return copy

    def _answer(self, request: Request) -> None:
        wanted: int | None = request.payload
        with self._lock:
            latest = self._latest
        if latest is None or (wanted is not None and latest.version < wanted):
            have = "nothing" if latest is None else f"version {latest.version}"
            text = f"{self._endpoint.id} has published {have}; {request.source} asked for {wanted}"
            known = None if latest is None else latest.version
            request.fail(WeightsUnknown(text, wanted=wanted, latest=known))
        else:
            request.reply(latest)


class WeightReceiver:
    """A rollout's side: brings `target` to a version of the trainer's."""

    def __init__(self, endpoint: Endpoint, target: WeightTarget) -> None:
        self._endpoint, self._target = endpoint, target
        self._serving = ""

    @property
    def fingerprint(self) -> str:
        """Of the weights that were fetched last; empty before."""
        return self._serving

    def fetch(
        self, trainer: str | WorkerId, version: int | None = None, timeout: TimeoutLike = DEFAULT
    ) -> Published:
        """Load the trainer's latest weights, which must be `version` or newer.

        Raises:
            WeightsUnknown: It has not published that version.
            WeightsCorrupt: The bytes that arrived are not those that were published.
            rlinf.comm.CommError: The trainer could not be reached in time.
        """
        answer = self._endpoint.call(SERVICE, version, to=trainer, timeout=timeout)
        latest = answer.result(timeout)
        if not isinstance(latest, Published):
            raise WeightsCorrupt(f"{trainer} answered {type(latest).__name__} in place of weights")
        if latest.fingerprint != self._serving:
            self._load(latest, str(trainer))
        return latest

    def _load(self, latest: Published, trainer: str) -> None:
        found = fingerprint(latest.state)
        if found != latest.fingerprint:
            raise WeightsCorrupt(
                f"version {latest.version} from {trainer} arrived with the fingerprint {found} in "
                f"place of {latest.fingerprint}; fetch it again",
                version=latest.version,
                expected=latest.fingerprint,
                found=found,
            )
        self._target.load_state(latest.state, latest.version)
        self._serving = found
