"""AdamW with warm-up and clipping over gradients that were summed and not averaged."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rlinf.workers.engines.optimiser_config import OptimiserConfig
from rlinf.workers.errors import WorkerError

__all__ = ["NonFiniteGradient", "Optimiser", "OptimiserConfig"]


class NonFiniteGradient(WorkerError):
    """The gradient holds NaN or infinity. No parameter was changed; the gradient is dropped."""


class Optimiser:
    """Steps over parameters whose `.grad` holds an un-normalised sum.

    Args:
        parameters: Those of this process.
        config: See there.
        norm: That of the whole gradient, where other processes hold parts of it.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        config: OptimiserConfig,
        norm: Callable[[], Tensor] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._norm = norm
        self._config = config
        self._calls = 0
        self._adam = torch.optim.AdamW(
            [{"params": self._parameters}],  # a process may hold none
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
            fused=True,
        )

    @property
    def lr(self) -> float:
        """Learning rate of the current (next to be finished) step."""
        warm, decay, count = self._config.warmup_steps, self._config.decay_steps, self._calls + 1
        risen = min(1.0, count / warm) if warm else 1.0
        fallen = 0.9 * min(1.0, count / decay) if decay else 0.0
        return self._config.lr * risen * (1.0 - fallen)

    def step(self, weight: float) -> float:
        """Divide the gradient by `weight`, clip, step and clear it. Returns its norm before that.

        With the weight 0, or a gradient of 0, no parameter moves, but the step counts for the
        warm-up. Raises `NonFiniteGradient`.
        """
        norm = self._apply(weight) if weight else 0.0
        self._adam.zero_grad()
        self._calls += 1
        return norm

    def _apply(self, weight: float) -> float:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if not gradients and self._norm is None:
            return 0.0
        if gradients and weight != 1:
            torch._foreach_div_(gradients, weight)
        norm = float(nn.utils.get_total_norm(gradients) if self._norm is None else self._norm())
        if not norm < float("inf"):
            self._adam.zero_grad()
            raise NonFiniteGradient(
                f"the gradient norm is {norm}; look at the loss, the learning rate "
                f"({self.lr:g}) and the rewards of this step"
            )
        if norm == 0.0:  # there is nothing to learn, so momentum moves nothing either
            return 0.0
        if gradients and norm > self._config.clip_norm:
            torch._foreach_mul_(gradients, self._config.clip_norm / (norm + 1e-6))
        for group in self._adam.param_groups:
            group["lr"] = self.lr
        self._adam.step()
        return norm

    @property
    def calls(self) -> int:
        """Steps so far, also those that moved nothing: the position in the warm-up."""
        return self._calls

    def state(self, names: Sequence[str]) -> dict[str, Tensor]:
        """What AdamW keeps (not copies), as `kind.name`; `names` are those of the parameters."""
        return {
            f"{kind}.{name}": value
            for name, parameter in zip(names, self._parameters, strict=True)
            for kind, value in self._adam.state.get(parameter, {}).items()
        }

    def load(self, names: Sequence[str], state: Mapping[str, Tensor], calls: int) -> None:
        """Go on from what `state` and `calls` said, with no gradient."""
        self._adam.zero_grad()
        self._calls = calls
        for name, parameter in zip(names, self._parameters, strict=True):
            had = self._adam.state.pop(parameter, {})
            for kind in ("step", "exp_avg", "exp_avg_sq"):
                if (value := state.get(f"{kind}.{name}")) is not None:
                    device = had[kind].device if kind in had else parameter.device
                    self._adam.state[parameter][kind] = value.to(device, copy=True)

    def tensors(self) -> Iterator[Tensor]:
        """Everything that lies on the device besides the parameters: gradients and moments."""
        yield from (p.grad for p in self._parameters if p.grad is not None)
        yield from self.moments()

    def moments(self) -> Iterator[Tensor]:
        """Of the gradients, as they lie on the device."""
        for parameter in self._parameters:
            for value in self._adam.state.get(parameter, {}).values():
                # The step counter stays where AdamW put it.
                if isinstance(value, Tensor) and value.dim():
                    yield value
