"""Weights on their way from a trainer to rollouts: versions, fingerprints, all or nothing.

The trainer publishes a version: a snapshot of the weights, in memory that is sent without another
copy. Receivers fetch it, whenever they are ready, from a service that the trainer's dispatching
thread answers; so a restarted receiver gets the current version while the trainer is busy, and on
one host all receivers read the same memory. A receiver says what it has and is sent only the
tensors that differ: all of them after a restart, the trained ones after a step.

Where the ranks of a trainer hold parts of the model, each of them publishes its own: boxes of
tensors (`Shard`), however they are cut. Nothing is gathered in one place before it leaves: a
receiver asks every rank, and puts the tensors together that it needs.

Both sides fingerprint the bytes. What does not match is refused before a parameter is touched, so
the old version goes on serving and a fetch can simply be repeated.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from rlinf.comm import DEFAULT, Endpoint, Request, WorkerId
from rlinf.comm.handle import TimeoutLike
from rlinf.workers.errors import WorkerError
from rlinf.workers.fingerprint import combined, marks_of
from rlinf.workers.shards import Shard, as_shards, assembled

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
AGAIN_S, AGREE_S = 0.05, 30.0
"""Ranks which publish a version, one after another, are asked again after so long, for so long."""

Parts = Mapping[str, Tensor | Shard]
"""Whole tensors by name, and boxes by name and place (`named`)."""


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
    """A version of the weights, as one rank offers it.

    Attributes:
        version: Its number.
        fingerprint: Of all parts of all ranks together.
        marks: The fingerprint of each of them.
        state: Those of this rank's parts that are asked for: a snapshot which nobody changes.
        mates: The other ranks, which offer the rest of it.
    """

    version: int
    fingerprint: str
    marks: Mapping[str, str] = field(repr=False)
    state: Parts = field(repr=False)
    mates: tuple[str, ...] = ()


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


def named(name: str, part: Tensor | Shard) -> str:
    """What a part of the tensor `name` is called: a box has its place in its name."""
    if isinstance(part, Shard) and tuple(part.values.shape) != part.shape:
        return f"{name}@{','.join(map(str, part.start))}"
    return name


def _tensor_of(part: str) -> str:
    return part.partition("@")[0]


def _values(part: Tensor | Shard) -> Tensor:
    return part.values if isinstance(part, Shard) else part


def _alone(marks: dict[str, str]) -> list[dict[str, str]]:
    return [marks]


class WeightPublisher:
    """The trainer's side. Serves "weights" on `endpoint` from now on.

    Args:
        mates: The other ranks that publish parts of the same weights.
        gather: Everybody's value, in order of rank, on every rank: then `publish` is collective.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        mates: tuple[str, ...] = (),
        gather: Callable[[dict[str, str]], list[dict[str, str]]] = _alone,
    ) -> None:
        self._endpoint, self._mates, self._gather = endpoint, mates, gather
        self._lock = threading.Lock()
        self._latest: Published | None = None
        endpoint.serve(SERVICE, self._answer)

    def publish(self, state: Parts, version: int) -> Published:
        """Make a snapshot of `state` the latest version. Publishing it again changes nothing.

        Memory is needed for the parts that changed only. When it fails the version before stays
        the latest one.

        Args:
            state: The tensors, or the boxes of them, that this rank is to hand out, by the names of
                the tensors.

        Raises:
            WeightsUnchanged: The version grew but not a byte is different (the optimiser's step did
                not reach these weights), or the same version now has other bytes.
        """
        parts, last = {named(name, part): part for name, part in state.items()}, self._latest
        own = marks_of({name: _values(part) for name, part in parts.items()})
        marks = {name: mark for rank in self._gather(own) for name, mark in rank.items()}
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
        copies = self._snapshot(parts, marks, last)
        latest = Published(version, mark, marks, copies, self._mates)
        with self._lock:
            self._latest = latest
        return latest

    def forget(self) -> None:
        """Offer nothing until the next `publish`: the trainer has gone back to older weights."""
        with self._lock:
            self._latest = None

    def _snapshot(self, parts: Parts, marks: Mapping[str, str], last: Published | None) -> Parts:
        """Copies of the parts; those that are as they were keep their copy."""
        kept: dict[str, Tensor | Shard] = {}
        if last is not None:
            kept = {n: t for n, t in last.state.items() if last.marks[n] == marks.get(n)}
        return {n: kept[n] if n in kept else self._copy(t) for n, t in parts.items()}

    def _copy(self, part: Tensor | Shard) -> Tensor | Shard:
        values = _values(part)
        copy: Tensor = self._endpoint.empty(tuple(values.shape), values.dtype)
        with torch.no_grad():
            copy.copy_(values)
        return replace(part, values=copy) if isinstance(part, Shard) else copy

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
        request.reply(replace(latest, state=missing))


class WeightReceiver:
    """A rollout's side: brings `target` to a version of the trainer's."""

    def __init__(self, endpoint: Endpoint, target: WeightTarget) -> None:
        self._endpoint, self._target = endpoint, target
        self._marks: Mapping[str, str] = {}
        self._tensors: dict[str, str] = {}

    @property
    def fingerprint(self) -> str:
        """Of the tensors that were fetched last, however they were cut; empty before."""
        return combined(self._tensors) if self._marks else ""

    def fetch(
        self, trainer: str | WorkerId, version: int | None = None, timeout: TimeoutLike = DEFAULT
    ) -> Published:
        """Load the trainer's latest weights, which must be `version` or newer.

        Args:
            trainer: One of its ranks; it names the others.
            timeout: For each answer. Ranks that offer different versions are asked again for
                `AGREE_S` on top of that.

        Returns:
            The version as whole tensors, of which `state` has those that changed.

        Raises:
            WeightsUnknown: It has not published that version.
            WeightsCorrupt: The bytes that arrived are not those that were published.
            rlinf.comm.CommError: The trainer could not be reached in time.
        """
        latest = self._changed(str(trainer), version, timeout)
        arrived = self._check(latest, str(trainer))
        tensors = _put_together(latest, str(trainer))
        known = self._tensors if self._marks else {}
        # Until all of it is known to be served, nothing is: after a failure all is sent again.
        self._marks, self._tensors = {}, {}
        self._target.load_state(tensors, latest.version)
        self._check_served(tensors, latest.version)
        cut = {n: tensor for n, tensor in tensors.items() if n not in arrived}
        whole = {n: mark for n, mark in arrived.items() if n in tensors}
        self._marks, self._tensors = latest.marks, {**known, **whole, **marks_of(cut)}
        mark, marks = self.fingerprint, self._tensors
        return replace(latest, fingerprint=mark, marks=marks, state=tensors)

    def _changed(self, trainer: str, version: int | None, timeout: TimeoutLike) -> Published:
        """Everything of those tensors of which something is not what was fetched last."""
        known = self._marks
        while True:
            latest = self._gathered(trainer, Wanted(version, known), timeout)
            changed = {_tensor_of(part) for part in latest.state}
            lacking = {n for n in latest.marks if _tensor_of(n) in changed} - latest.state.keys()
            asked = {n: mark for n, mark in known.items() if n not in lacking}
            if asked == known:  # a part that is lacking all the same is what nobody offers
                return latest
            known = asked

    def _gathered(self, trainer: str, wanted: Wanted, timeout: TimeoutLike) -> Published:
        """What all ranks offer of one version; they may be about to publish another."""
        until = time.monotonic() + AGREE_S
        while True:
            [first] = self._asked([trainer], wanted, timeout)
            try:
                others = self._asked(first.mates, replace(wanted, version=first.version), timeout)
                agree = all(other.fingerprint == first.fingerprint for other in others)
            except WeightsUnknown:
                agree = False
            if agree:
                state = {n: p for rank in (first, *others) for n, p in rank.state.items()}
                return replace(first, state=state)
            if time.monotonic() > until:
                ranks = ", ".join((trainer, *first.mates))
                text = f"{ranks} publish different versions, and did for {AGREE_S:g} s"
                raise WeightsUnknown(text, wanted=wanted.version, latest=first.version)
            time.sleep(AGAIN_S)

    def _asked(self, ranks: Sequence[str], wanted: Wanted, timeout: TimeoutLike) -> list[Published]:
        calls = [self._endpoint.call(SERVICE, wanted, to=rank, timeout=timeout) for rank in ranks]
        answers = [call.result(timeout) for call in calls]
        for rank, answer in zip(ranks, answers, strict=True):
            if not isinstance(answer, Published):
                raise WeightsCorrupt(f"{rank} answered {type(answer).__name__} in place of weights")
        return answers

    def _check(self, latest: Published, trainer: str) -> dict[str, str]:
        """What arrived is what was published, and with what is here it is the whole version.

        Returns the marks of what arrived.
        """
        arrived = marks_of({n: _values(part) for n, part in latest.state.items()})
        found = combined({n: arrived.get(n, self._marks.get(n, "")) for n in latest.marks})
        if found != latest.fingerprint:
            raise WeightsCorrupt(
                f"version {latest.version} from {trainer} arrived with the fingerprint {found} in "
                f"place of {latest.fingerprint}; fetch it again",
                version=latest.version,
                expected=latest.fingerprint,
                found=found,
            )
        return arrived

    def _check_served(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """The engine serves what it was given, in its own dtype."""
        serving = self._target.state()
        for name, value in tensors.items():
            if name not in serving:
                continue
            served = serving[name]
            if not torch.equal(served, value.to(served.device, served.dtype)):
                raise WeightsCorrupt(
                    f"{self._endpoint.id} loaded version {version}, but its engine still serves "
                    f"another {name}: it must copy weights in place, into the tensors that it "
                    "computes with",
                    version=version,
                )


def _put_together(latest: Published, trainer: str) -> dict[str, Tensor]:
    """Whole tensors from boxes; one that came whole is not copied."""
    try:
        return assembled((_tensor_of(n), shard) for n, shard in as_shards(latest.state).items())
    except ValueError as error:
        text = f"the ranks of {trainer} do not publish all of version {latest.version}: {error}"
        raise WeightsCorrupt(text, version=latest.version) from error
