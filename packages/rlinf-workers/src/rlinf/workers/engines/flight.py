"""Bookkeeping of a rollout: where results go, which rows are being decoded. No model here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rlinf.workers.engines.backbone import Cache
from rlinf.workers.engines.sampling import UintArray, streams
from rlinf.workers.roles.rollout import FINISH_REASONS, GenerationRequest, Group, IntArray

__all__ = ["Flight", "Opening", "Results"]

Indexes = npt.NDArray[np.int64]
LENGTH = FINISH_REASONS.index("length")
STOP = FINISH_REASONS.index("stop")
ABORTED = FINISH_REASONS.index("aborted")


@dataclass(frozen=True, slots=True)
class Opening:
    """Samples that begin, or go on.

    Attributes:
        slots: Where each is kept.
        counts: Tokens that each has already.
        sequences: What has to be read.
        source: Which of these each sample follows.
    """

    slots: Indexes
    counts: Indexes
    sequences: Sequence[IntArray]
    source: Indexes


class Results:
    """The samples of some requests, written token by token. One slot a sample, in order."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests = requests
        counts = np.array([request.n for request in requests])
        longest = max(request.max_new_tokens for request in requests)
        total = int(counts.sum())
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._left = counts.copy()
        self._tokens = np.zeros((total, longest), np.int32)
        self._logprobs = np.zeros((total, longest), np.float32)
        self._drawn_with = np.zeros((total, longest), np.int32)
        self._lengths = np.zeros(total, np.int32)
        self._finish = np.full(total, ABORTED, np.uint8)
        self._versions = np.zeros(total, np.int32)
        self.random = np.concatenate([streams(r.sampling.seed, r.uid, r.n) for r in requests])
        """Each slot's stream of random numbers."""
        self.owner = np.repeat(np.arange(len(requests)), counts)
        """The number of each slot's request."""

    def open(self, number: int, version: int) -> Opening:
        """The samples of a request that begins now, with the weights `version`."""
        request = self.requests[number]
        slots = np.arange(self._starts[number], self._ends[number])
        self._versions[slots] = version
        if request.begun is None:
            nothing = np.zeros(request.n, np.int64)
            return Opening(slots, nothing, [request.prompt_ids], nothing)
        open = slots[self._copied(request.begun, slots)]
        self._left[number] = len(open)
        counts = self._lengths[open].astype(np.int64)
        sequences = [
            np.concatenate([request.prompt_ids, self.response(slot)]).astype(np.int32)
            for slot in open
        ]
        return Opening(open, counts, sequences, np.arange(len(open)))

    def _copied(self, begun: Group, slots: Indexes) -> npt.NDArray[np.bool_]:
        """Take over what a group has; which of its samples go on."""
        width = begun.tokens.shape[1]
        known = begun.token_versions
        self._tokens[slots, :width] = begun.tokens
        self._logprobs[slots, :width] = begun.logprobs
        self._drawn_with[slots, :width] = begun.versions[:, None] if known is None else known
        self._lengths[slots] = begun.lengths
        self._finish[slots] = begun.finish
        self._versions[slots] = np.where(begun.lengths, begun.versions, self._versions[slots])
        return np.asarray(begun.finish == ABORTED)

    def response(self, slot: int) -> IntArray:
        """What there is of a sample."""
        return self._tokens[slot, : self._lengths[slot]]

    def write(
        self, slots: Indexes, at: Indexes, tokens: Indexes, logprobs: Tensor, version: int
    ) -> None:
        """Token number `at` of each of `slots`, drawn with the weights `version`."""
        self._tokens[slots, at] = tokens
        self._logprobs[slots, at] = logprobs.cpu().numpy()
        self._drawn_with[slots, at] = version
        self._lengths[slots] = at + 1

    def close(self, slots: Indexes, stopped: npt.NDArray[np.bool_]) -> Iterator[Group]:
        """These samples are done; yields the groups which that completes."""
        self._finish[slots] = np.where(stopped, STOP, LENGTH)
        owners, counts = np.unique(self.owner[slots], return_counts=True)
        self._left[owners] -= counts
        for request in owners[self._left[owners] == 0]:
            yield self.group(int(request))

    def group(self, number: int) -> Group:
        """A request's samples as they are; those which were not closed are `aborted`."""
        request = self.requests[number]
        rows = slice(self._starts[number], self._ends[number])
        lengths = self._lengths[rows].copy()
        width = int(lengths.max())
        return Group(
            uid=request.uid,
            prompt_ids=np.asarray(request.prompt_ids, np.int32),
            tokens=self._tokens[rows, :width].copy(),
            lengths=lengths,
            logprobs=self._logprobs[rows, :width].copy(),
            finish=self._finish[rows].copy(),
            versions=self._versions[rows].copy(),
            sampling=request.sampling,
            item=request.item,
            token_versions=self._token_versions(rows, width),
        )

    def _token_versions(self, rows: slice, width: int) -> IntArray | None:
        inside = np.arange(width) < self._lengths[rows][:, None]
        versions = np.where(inside, self._drawn_with[rows, :width], 0)
        same = (versions == self._versions[rows][:, None]) | ~inside
        return None if same.all() else versions


@dataclass(slots=True)
class Flight:
    """The rows being decoded, in the order of the cache. Dead rows stay until they are dropped.

    Attributes:
        cache: Keys and values of everything before `tokens`; None for rows not yet in one.
        tokens: int64 [rows] on the device, the last token of each row.
        slots: Where each row's sample is kept.
        counts: Tokens drawn so far.
        limits: Bound on them.
        widths: Bound on the positions in the cache, the prompt's included.
        random: Each row's stream of random numbers.
        alive: Whether the row goes on.
    """

    cache: Cache
    tokens: Tensor
    slots: Indexes
    counts: Indexes
    limits: Indexes
    widths: Indexes
    random: UintArray
    alive: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, results: Results, openings: Sequence[Opening], cache: Cache) -> "Flight":
        """Rows for these samples, in the order of `cache`; nothing is drawn yet (no `tokens`)."""
        slots = np.concatenate([opening.slots for opening in openings])
        asked = [results.requests[number] for number in results.owner[slots]]
        limits = np.array([request.max_new_tokens for request in asked])
        return cls(
            cache=cache,
            tokens=Tensor(),
            slots=slots,
            counts=np.concatenate([opening.counts for opening in openings]),
            limits=limits,
            widths=limits + np.array([len(request.prompt_ids) for request in asked]),
            random=results.random[slots],
            alive=np.ones(len(slots), bool),
        )

    @property
    def rows(self) -> int:
        """Rows, dead ones included."""
        return len(self.alive)

    @property
    def remaining(self) -> int:
        """Bound on the steps until the last row ends."""
        return int((self.limits - self.counts)[self.alive].max(initial=0))

    def select(self, rows: Indexes, on_device: Tensor) -> "Flight":
        """These rows, in this order; `on_device` holds the same numbers."""
        return Flight(
            self.cache.select(on_device, self.remaining),
            self.tokens[on_device],
            self.slots[rows],
            self.counts[rows],
            self.limits[rows],
            self.widths[rows],
            self.random[rows],
            self.alive[rows],
        )
