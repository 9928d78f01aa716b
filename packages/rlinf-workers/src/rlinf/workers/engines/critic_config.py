"""What a critic is told, as plain data."""

from dataclasses import dataclass, field

from rlinf.workers.bounds import Count, Share
from rlinf.workers.engines.optimiser_config import OptimiserConfig

__all__ = ["CriticConfig"]


@dataclass(frozen=True, slots=True)
class CriticConfig:
    """How a critic estimates and learns.

    Attributes:
        optimiser: AdamW's settings.
        gamma: Discount of a later reward, a trainable token.
        lam: How far advantages trust later rewards (1) over the critic's next value (0).
        micro_batch_tokens: Bound on the tokens that go through the model at once, if one group
            alone does not exceed it.
        ranks: Workers of the critic, a process each with the whole model. Each takes some of a
            step's samples, and they step with the sum of their gradients.
    """

    optimiser: OptimiserConfig = field(default_factory=lambda: OptimiserConfig(lr=1e-3))
    gamma: Share = 1.0
    lam: Share = 1.0
    micro_batch_tokens: Count = 16384
    ranks: Count = 1
