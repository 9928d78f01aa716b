"""Bookkeeping of a rollout: where results go, which rows are being decoded. No model here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from rlinf.workers.engines.backbone import Cache
from rlinf.workers.engines.sampling import UintArray, streams
from rlinf.workers.roles.rollout import FINISH_REASONS, GenerationRequest, Group

__all__ = ["Flight", "Results"]

Indexes = npt.NDArray[np.int64]
STOP = FINISH_REASONS.index("stop")


class Results:
    """The samples of some requests, written token by token. One slot a sample, in order."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests = requests
        counts = np.array([request.n for request in requests])
        longest = max(request.max_new_tokens for request in requests)
        total = int(counts.sum())
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        self._owner = np.repeat(np.arange(len(requests)), counts)
        self._left = counts.copy()
        self._tokens = np.zeros((total, longest), np.int32)
        self._logprobs = np.zeros((total, longest), np.float32)
        self._lengths = np.zeros(total, np.int32)
        self._finish = np.zeros(total, np.uint8)
        self._versions = np.zeros(total, np.int32)

    def open(self, request: int, version: int) -> Indexes:
        """The slots of a request that begins now, with the weights `version`."""
        slots = np.arange(self._starts[request], self._ends[request])
        self._versions[slots] = version
        return slots

    def write(self, slots: Indexes, at: Indexes, tokens: Indexes, logprobs: Tensor) -> None:
        """Token number `at` of each of `slots`."""
        self._tokens[slots, at] = tokens
        self._logprobs[slots, at] = logprobs.cpu().numpy()
        self._lengths[slots] = at + 1

    def close(self, slots: Indexes, stopped: npt.NDArray[np.bool_]) -> Iterator[Group]:
        """These samples are done; yields the groups which that completes."""
        self._finish[slots[stopped]] = STOP
        owners, counts = np.unique(self._owner[slots], return_counts=True)
        self._left[owners] -= counts
        for request in owners[self._left[owners] == 0]:
            yield self._group(int(request))

    def _group(self, number: int) -> Group:
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
        )


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
    def of(
        cls, requests: Sequence[GenerationRequest], slots: Sequence[Indexes], cache: Cache
    ) -> "Flight":
        """Rows for these requests, nothing drawn yet (`tokens` is empty)."""
        sizes = [request.n for request in requests]
        rows = sum(sizes)
        limits = np.array([request.max_new_tokens for request in requests])
        prompts = np.array([len(request.prompt_ids) for request in requests])
        return cls(
            cache=cache,
            tokens=Tensor(),
            slots=np.concatenate(slots),
            counts=np.zeros(rows, np.int64),
            limits=np.repeat(limits, sizes),
            widths=np.repeat(prompts + limits, sizes),
            random=np.concatenate([streams(r.sampling.seed, r.uid, r.n) for r in requests]),
            alive=np.ones(rows, bool),
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
