"""What an algorithm is put together from, as plain data: a program reads it without torch."""

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "BATCH_ADVANTAGES",
    "AdvantageKind",
    "Clip",
    "DynamicSampling",
    "KlKind",
    "LossKind",
    "Normalisation",
    "Overlong",
]

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "reinforce++", "gae"]
BATCH_ADVANTAGES: frozenset[AdvantageKind] = frozenset({"reinforce++", "gae"})
"""Those that all of a step's samples decide; the others are decided by one group."""
LossKind = Literal["ppo", "gspo", "cispo"]
KlKind = Literal["k1", "k2", "k3", "k1+", "k3+"]


@dataclass(frozen=True, slots=True)
class Clip:
    """How far the ratio of new to old probability may go before a token's gradient is cut.

    Attributes:
        low: 1 - low is the lower bound.
        high: 1 + high is the upper bound. More than `low` is "clip-higher": DAPO, Yu et al. 2025,
            arXiv:2503.14476, section 3.1.
        dual: Bound on the loss of tokens with a negative advantage, as a multiple of it: dual-clip
            PPO, Ye et al. 2019, arXiv:1912.09729, equation 5. None: no bound.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __post_init__(self) -> None:
        if self.low < 0 or self.high < 0 or (self.dual is not None and self.dual <= 1):
            raise ValueError(f"{self}: low and high must not be negative, dual must be above 1")


@dataclass(frozen=True, slots=True)
class Normalisation:
    """What the summed loss is divided by.

    Attributes:
        kind: `token`: the number of trainable tokens (DAPO, arXiv:2503.14476, section 3.3).
            `sequence`: mean over the tokens of a row, then over the rows that have any (GRPO).
            `constant`: `constant` times the number of rows (Dr. GRPO, arXiv:2503.20783).
        constant: The divisor of `constant`: a fixed number of tokens, usually the longest response
            allowed, never the padded width of a batch. None where it is not known yet; then
            `reduce` refuses.
    """

    kind: Literal["token", "sequence", "constant"] = "token"
    constant: float | None = None

    def __post_init__(self) -> None:
        misplaced = self.kind != "constant" and self.constant is not None
        if misplaced or (self.constant is not None and self.constant <= 0):
            raise ValueError(
                f"{self}: a positive constant belongs to kind=constant, and only there"
            )


@dataclass(frozen=True, slots=True)
class Overlong:
    """The penalty of responses that come close to the longest allowed.

    Attributes:
        buffer: Tokens before the limit over which the penalty grows from 0.
        penalty: What is taken off at the limit and beyond.
    """

    buffer: int = 4096
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.buffer < 1 or self.penalty < 0:
            raise ValueError(f"{self}: the buffer is at least 1, the penalty at least 0")


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """Sample on until a step has enough groups to learn from, but not for ever.

    Source: DAPO, section 3.2. A further round asks for as many groups as are lacking. Nothing
    sampled is thrown away.

    Attributes:
        groups: Informative groups that a step wants.
        rounds: After so many rounds of sampling it makes do with what there is.
    """

    groups: int = 0
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.groups < 0 or self.rounds < 1:
            raise ValueError(f"{self}: groups is at least 0, rounds at least 1")

    def lacking(self, found: int, rounds: int) -> int:
        """Groups to sample after `rounds` rounds that found so many informative ones; 0: none."""
        return max(0, self.groups - found) if rounds < self.rounds else 0
