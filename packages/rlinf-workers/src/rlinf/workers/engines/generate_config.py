"""What a rollout engine is told, as plain data."""

from dataclasses import dataclass, field

from rlinf.workers.bounds import Count
from rlinf.workers.engines.sglang.config import SglangConfig

__all__ = ["STABLE_ROWS", "GenerateConfig"]

STABLE_ROWS = 16
"""From this many rows on a row of a matrix product does, in all but rare cases, not depend on the
number of rows; the libraries have other kernels, with another order of summation, for fewer."""


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """Which rollout engine, and the limits of the embedded one.

    Attributes:
        name: torch: the embedded one; sglang; or a plug-in's.
        sglang: How SGLang is reached.
        max_rows: Samples decoded at the same time; a request with more is decoded alone.
        min_rows: Fewer rows are filled up with idle ones. Matrix products of a few rows round
            differently from those of many; with this a sample's log-probs depend on what is decoded
            beside it by rounding at most, and for equally long sequences not at all. 1: no filling.
        cache_bytes: Bound on the memory for keys and values.
        prefill_tokens: Bound on the prompt tokens read at once.
    """

    name: str = "torch"
    sglang: SglangConfig = field(default_factory=SglangConfig)
    max_rows: Count = 512
    min_rows: Count = STABLE_ROWS
    cache_bytes: Count = 2 << 30
    prefill_tokens: Count = 32768
