"""What an optimiser is told, as plain data."""

from dataclasses import dataclass

from rlinf.workers.bounds import Natural, NonNegative, Positive, Share

__all__ = ["OptimiserConfig"]


@dataclass(frozen=True, slots=True)
class OptimiserConfig:
    """AdamW: Loshchilov and Hutter 2017, arXiv:1711.05101.

    Attributes:
        lr: Learning rate after the warm-up.
        warmup_steps: Steps over which it rises linearly; 0: none.
        decay_steps: Steps from the first one over which it falls linearly to a tenth; 0: none.
        beta1: Decay of the mean gradient.
        beta2: Decay of the mean squared gradient.
        weight_decay: Share of a parameter taken off per unit of learning rate.
        clip_norm: Bound on the norm of the whole gradient.
    """

    lr: NonNegative = 5e-4
    warmup_steps: Natural = 5
    decay_steps: Natural = 0
    beta1: Share = 0.9
    beta2: Share = 0.95
    weight_decay: NonNegative = 0.0
    clip_norm: Positive = 1.0
