"""Rollout: requests in, groups of sampled responses out. Plain numpy, cheap to send.

Token ids are the record of what was sampled; text is derived from them and never tokenised again.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from rlinf.workers.roles.episode import Episodes
from rlinf.workers.roles.residency import Residency

__all__ = ["FINISH_REASONS", "GenerationRequest", "Group", "RolloutEngine", "Sampling"]

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

FINISH_REASONS = ("length", "stop", "aborted")
"""What the numbers in `Group.finish` mean. The stop token is part of the response."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. A trainer needs it too, to know which distribution they came from.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token (log-probs at temperature 1).
        top_k: Draw from the k likeliest tokens only; 0: from all.
        top_p: Draw from the likeliest tokens that hold this much probability; 1: from all.
        min_p: Draw from tokens that have this part of the likeliest one's share; 0: from all.
        stop_ids: A response ends with the first of these.
        stop_strings: A response ends with the token that completes one of these in its text.
        banned_ids: Tokens that are never drawn; they have no share in the softmax.
        logprobs: Which log-prob of a drawn token is recorded. `full`: of the softmax at this
            temperature without the banned tokens, which a trainer can compute again. `processed`:
            after top-k, top-p and min-p, renormalised; it differs from the former by the log of the
            mass that was kept.
        seed: With a request's uid, a sample's index and a token's position it decides each draw.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    banned_ids: tuple[int, ...] = ()
    logprobs: Literal["full", "processed"] = "full"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.top_k < 0:
            raise ValueError(f"{self}: temperature and top_k are at least 0")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"{self}: top_p is in (0, 1], min_p in [0, 1]")
        if "" in self.stop_strings:
            raise ValueError(f"{self}: a stop string has at least one character")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to sample `n` responses for.

    Attributes:
        uid: Unique among all requests of a run: the same uid draws the same samples again.
        prompt_ids: int32 [P], P at least 1.
        n: Number of samples.
        max_new_tokens: Bound on the tokens of a response, a stop token included.
        sampling: How tokens are drawn.
        item: Which item of the data set the prompt was made from; carried to the group unread.
        begun: An aborted group of this request: its samples go on where they were cut off.
    """

    uid: str
    prompt_ids: IntArray
    n: int = 1
    max_new_tokens: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    item: int = -1
    begun: "Group | None" = None

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_new_tokens < 1 or len(self.prompt_ids) < 1:
            raise ValueError(f"request {self.uid}: n, max_new_tokens and the prompt's length >= 1")
        begun = self.begun
        if begun is not None:
            fits = begun.n == self.n and np.array_equal(begun.prompt_ids, self.prompt_ids)
            if not fits or begun.uid != self.uid or begun.tokens.shape[1] > self.max_new_tokens:
                raise ValueError(f"request {self.uid} cannot go on with {begun.uid}: it is another")


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The n responses sampled for one prompt.

    Attributes:
        uid: Of the request.
        prompt_ids: int32 [P].
        tokens: int32 [n, T]; T is the longest response, 0 after the end of a shorter one.
        lengths: int32 [n], the number of tokens of each response.
        logprobs: float32 [n, T], of each token when it was drawn; 0 after the end.
        finish: uint8 [n], indexes into `FINISH_REASONS`.
        versions: int32 [n], the weights that were serving when the sample began.
        sampling: As in the request.
        item: As in the request.
        token_versions: int32 [n, T], the weights that each token was drawn with, where they were
            not the same for all of a sample; None: they were.
        written: bool [n, T], which tokens the model wrote, where a tool or an environment wrote
            others; None: all of them. Only what the model wrote is trained on and judged.
        episodes: How each sample went, where it had several turns; else None.
    """

    uid: str
    prompt_ids: IntArray
    tokens: IntArray
    lengths: IntArray
    logprobs: FloatArray
    finish: npt.NDArray[np.uint8]
    versions: IntArray
    sampling: Sampling
    item: int = -1
    token_versions: IntArray | None = None
    written: npt.NDArray[np.bool_] | None = None
    episodes: Episodes | None = None

    @property
    def n(self) -> int:
        """Number of samples."""
        return len(self.tokens)

    @property
    def trainable(self) -> npt.NDArray[np.bool_]:
        """Which places hold a token that the model wrote, bool [n, T]."""
        inside = np.arange(self.tokens.shape[1]) < self.lengths[:, None]
        return inside if self.written is None else inside & self.written.astype(bool)

    @property
    def written_lengths(self) -> npt.NDArray[np.int64]:
        """How many tokens of each sample the model wrote, int64 [n]."""
        return np.asarray(self.trainable.sum(1), np.int64)

    @property
    def token_count(self) -> int:
        """Tokens that the model wrote, of all responses together."""
        return int(self.trainable.sum())

    @property
    def complete(self) -> bool:
        """Whether no sample was cut off."""
        return not (self.finish == FINISH_REASONS.index("aborted")).any()

    @property
    def mixed(self) -> int:
        """Samples whose tokens were drawn with more than one version of the weights."""
        versions = self.token_versions
        if versions is None:
            return 0
        inside = np.arange(versions.shape[1]) < self.lengths[:, None]
        return int(((versions != self.versions[:, None]) & inside).any(1).sum())

    def response(self, sample: int) -> IntArray:
        """The token ids of one sample, without padding."""
        return self.tokens[sample, : self.lengths[sample]]

    def resumed(self, max_new_tokens: int) -> GenerationRequest:
        """The request which goes on with those samples that were aborted."""
        return GenerationRequest(
            self.uid, self.prompt_ids, self.n, max_new_tokens, self.sampling, self.item, self
        )

    def own(self, sample: int) -> IntArray:
        """The token ids of one sample that the model itself wrote."""
        response = self.response(sample)
        if self.written is None:
            return response
        ids: IntArray = response[self.written[sample, : len(response)].astype(bool)]
        return ids

    def stopped(self) -> npt.NDArray[np.bool_]:
        """Which samples ended with a stop token, bool [n]."""
        return np.asarray(self.finish == FINISH_REASONS.index("stop"))


@runtime_checkable
class RolloutEngine(Residency, Protocol):
    """Samples responses with the newest weights it was given.

    What it samples for a request depends on nothing but the weights and the request: neither on
    the other requests it works on at the same time, nor on how they were cut into calls.
    """

    @property
    def version(self) -> int:
        """Version of the weights that are serving; 0 for those it was made with."""

    def generate(self, requests: Iterable[GenerationRequest]) -> Iterator[Group]:
        """Yield one group a request, in the order in which they complete."""

    def bursts(self, requests: Iterable[GenerationRequest]) -> Iterator[list[Group]]:
        """The same, with those together that complete together."""

    def abort(self, uids: Collection[str] | None = None) -> None:
        """End these requests of the `generate` under way (None: all) at their next token.

        From any thread. Their groups are yielded with what was sampled, `aborted`, and can be gone
        on with; samples that had ended are as they would have been.
        """
