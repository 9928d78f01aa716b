"""Rewards from a service over HTTP, with a deadline and a bounded number of tries.

    POST <url>  {"responses": [{"item": int, "response": str, "prompt": str}, ...]}
    200         {"scores": [float | null, ...]}     one for each, in order; null: cannot be judged

What has no answer by the deadline is `unscored`, whatever the reason; the log says which. Only what
may be different the next time is tried again: no connection, a time-out, and the codes 429, 500,
502, 503 and 504.
"""

import json
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rlinf.workers.bounds import Count, NonNegative, Positive
from rlinf.workers.http_post import FAILURES, RETRIED, Refused, post
from rlinf.workers.roles.reward import Score, ScoredGroup
from rlinf.workers.roles.rollout import Group

__all__ = ["HttpReward", "HttpRewardConfig", "HttpStatistics"]

log = logging.getLogger(__name__)

UNSCORED = Score(0.0, "unscored")

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class HttpRewardConfig:
    """Where and how the service is asked.

    Attributes:
        url: http or https.
        deadline_s: For one batch, all tries and pauses together.
        tries: At most so many.
        pause_s: Before the second try; twice as long before each further one, give or take half.
        batch: Responses a request, at most.
        connections: Requests under way at the same time.
    """

    url: str
    deadline_s: Positive = 30.0
    tries: Count = 3
    pause_s: NonNegative = 0.5
    batch: Count = 64
    connections: Count = 4

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url}: must begin with http:// or https://")
        if min(self.deadline_s, self.tries, self.batch, self.connections) <= 0 or self.pause_s < 0:
            raise ValueError(f"{self}: all numbers are above 0, pause_s at least 0")


@dataclass(frozen=True, slots=True)
class HttpStatistics:
    """What was done so far: responses scored and unscored, and requests sent, tries included."""

    scored: int = 0
    unscored: int = 0
    requests: int = 0


class HttpReward:
    """A `RewardEngine` that asks a service. Thread-safe.

    `decode` turns token ids into text, of prompts and of what the model wrote.
    """

    def __init__(self, decode: Decode, config: HttpRewardConfig) -> None:
        self._decode, self._config = decode, config
        self._lock = threading.Lock()
        self._scored = self._unscored = self._requests = 0

    def score(self, groups: Sequence[Group]) -> list[ScoredGroup]:
        """One verdict a sample. See `RewardEngine`."""
        asked = [self._entry(group, i) for group in groups for i in range(group.n)]
        size = self._config.batch
        batches = [asked[start : start + size] for start in range(0, len(asked), size)]
        with ThreadPoolExecutor(self._config.connections) as threads:
            found = iter([s for scores in threads.map(self._batch, batches) for s in scores])
        return [ScoredGroup.of(group, [next(found) for _ in range(group.n)]) for group in groups]

    def statistics(self) -> HttpStatistics:
        """What was done so far."""
        with self._lock:
            return HttpStatistics(self._scored, self._unscored, self._requests)

    def _entry(self, group: Group, sample: int) -> dict[str, object]:
        return {
            "item": group.item,
            "prompt": self._decode(group.prompt_ids.tolist()),
            "response": self._decode(group.own(sample).tolist()),
        }

    def _batch(self, entries: Sequence[dict[str, object]]) -> list[Score]:
        body = json.dumps({"responses": entries}).encode()
        deadline = time.monotonic() + self._config.deadline_s
        scores = self._tried(body, len(entries), deadline)
        unscored = sum(score.status == "unscored" for score in scores)
        with self._lock:
            self._scored += len(scores) - unscored
            self._unscored += unscored
        return scores

    def _tried(self, body: bytes, count: int, deadline: float) -> list[Score]:
        config, cause = self._config, "the deadline passed"
        for attempt in range(config.tries):
            if attempt:
                pause = config.pause_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            left = deadline - time.monotonic()
            if left <= 0:
                break
            with self._lock:
                self._requests += 1
            try:
                return _scores(post(config.url, body, left), count)
            except Refused as error:
                cause = str(error)
                if error.status not in RETRIED:
                    break
            except FAILURES as error:
                cause = f"{type(error).__name__}: {error}"
            except ValueError as error:
                cause = str(error)
                break
        log.warning("%s gave no scores for %d responses: %s", config.url, count, cause)
        return [UNSCORED] * count


def _scores(answer: bytes, count: int) -> list[Score]:
    """The scores in an answer. Raises `ValueError` where it is not what the protocol says."""
    tree = json.loads(answer)
    values = tree.get("scores") if isinstance(tree, dict) else None
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"the answer has no list `scores` of {count}")
    return [_score(value) for value in values]


def _score(value: object) -> Score:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return Score(float(value)) if known and math.isfinite(value) else UNSCORED  # type: ignore[arg-type]
