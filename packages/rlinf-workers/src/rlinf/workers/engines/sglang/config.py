"""How SGLang is reached, as plain data."""

from dataclasses import dataclass

from rlinf.workers.bounds import Count, Positive

__all__ = ["SglangConfig"]


@dataclass(frozen=True, slots=True)
class SglangConfig:
    """How SGLang is reached.

    Attributes:
        url: Of a server that runs; empty: an engine is started in the rollout's process, on its
            devices. It must have been started for the model that is trained.
        ranks: Its tensor parallel size.
        timeout_s: Deadline of one call of it, that of a whole response included.
        concurrency: Requests that a server is asked for at the same time.
        bucket_bytes: Weights sent in one piece.
    """

    url: str = ""
    ranks: Count = 1
    timeout_s: Positive = 600.0
    concurrency: Count = 256
    bucket_bytes: Count = 512 << 20
