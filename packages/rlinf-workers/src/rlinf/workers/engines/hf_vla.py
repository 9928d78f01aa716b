"""Vision-language-action checkpoints with OpenVLA's interface, as a policy.

A vision tower, a projector and a language model answer a prompt with the tokens of one action, one
token a number, drawn one after another. Source of the interface: OpenVLA, Kim et al. 2024,
arXiv:2406.09246, section 3: the last ids of the vocabulary are the action tokens, in reverse order
of their values; they stand for the centres of bins between -1 and 1, which statistics of the
training data (1st and 99th percentile of each number) bring to the robot's scale.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlinf.workers.engines.layers import head_of_zeros
from rlinf.workers.engines.torch_actor import TorchActor
from rlinf.workers.errors import ConfigError
from rlinf.workers.roles.policy import Evaluation
from rlinf.workers.roles.simulator import Field

__all__ = ["HfVlaPolicy", "HfVlaSpec", "openvla_prompt"]

Statistics = tuple[tuple[float, ...], tuple[float, ...]]


def openvla_prompt(instruction: str) -> str:
    """What OpenVLA was trained to answer."""
    return f"In: What action should the robot take to {instruction.lower()}?\nOut:"


@dataclass(frozen=True, slots=True)
class HfVlaSpec:
    """What a checkpoint's own files say of it.

    Attributes:
        prompt_ids: Of the prompt, image placeholders included where the model wants them in it.
        q01: 1st percentile of each number of an action; its length is that of an action.
        q99: 99th percentile.
        scaled: Which numbers are brought from [-1, 1] to [q01, q99]; the gripper's is usually not.
        bins: Action tokens; their centres are one fewer.
        vocabulary: Ids below this; those of action tokens end here.
        image_size: Edge of the picture that the vision tower takes.
        normalisations: (mean, std) of each channel; several are stacked as further channels, for a
            tower of two.
    """

    prompt_ids: tuple[int, ...]
    q01: tuple[float, ...]
    q99: tuple[float, ...]
    scaled: tuple[bool, ...]
    vocabulary: int
    image_size: int
    bins: int = 256
    normalisations: tuple[Statistics, ...] = field(default=(((0.5,) * 3, (0.5,) * 3),))

    def __post_init__(self) -> None:
        if not len(self.q01) == len(self.q99) == len(self.scaled) > 0 or not self.prompt_ids:
            raise ConfigError("q01, q99 and scaled need a value for each number of an action")


class HfVlaPolicy(nn.Module):
    """A `Policy` around a transformers model that maps (input_ids, pixel_values) to logits.

    The value is read from the hidden state that predicts the first action token; its head begins
    at 0. Reads the observation `image`.
    """

    def __init__(self, model: nn.Module, spec: HfVlaSpec, hidden_size: int) -> None:
        super().__init__()
        self.model, self.spec = model, spec
        self.value_head = head_of_zeros(hidden_size, next(model.parameters()))

    @property
    def size(self) -> int:
        """Tokens of an action."""
        return len(self.spec.q01)

    def pixels(self, images: Tensor) -> Tensor:
        """Pictures uint8 [B, H, W, 3] as the vision tower takes them, [B, channels, S, S]."""
        spec = self.spec
        scaled = images.movedim(-1, 1).float() / 255
        if scaled.shape[-2:] != (spec.image_size,) * 2:
            scaled = functional.interpolate(
                scaled, (spec.image_size,) * 2, mode="bilinear", antialias=True
            )
        parts = [
            (scaled - scaled.new_tensor(mean)[:, None, None])
            / scaled.new_tensor(std)[:, None, None]
            for mean, std in spec.normalisations
        ]
        return torch.cat(parts, 1).to(self.value_head.weight.dtype)

    def actions(self, tokens: Tensor) -> Tensor:
        """What action tokens [B, 1, A], 0 to bins - 1, mean to the robot; float32."""
        spec = self.spec
        edges = torch.linspace(-1, 1, spec.bins, device=tokens.device)
        centres = (edges[1:] + edges[:-1]) / 2
        plain = centres[(spec.bins - 1 - tokens).clamp(0, spec.bins - 2)]
        low, high = (plain.new_tensor(bound) for bound in (spec.q01, spec.q99))
        scaled = low + (plain + 1) / 2 * (high - low)
        return torch.where(torch.tensor(spec.scaled, device=tokens.device), scaled, plain)

    def draw(
        self, observations: Mapping[str, Tensor], noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Draws`; a forward for the prompt, and one a token after the first."""
        pixels = self.pixels(observations["image"])
        ids = self._prompt(len(pixels))
        found = self.model(input_ids=ids, pixel_values=pixels, use_cache=True)
        tokens, total = [], torch.zeros(len(pixels), device=ids.device)
        for place in range(self.size):
            logprobs = self._of_actions(found.logits[:, -1:])[:, 0]
            if noise is None:
                token = logprobs.argmax(-1)
            else:
                reached = logprobs.exp().cumsum(-1) <= noise[:, place, None]
                token = reached.sum(-1).clamp(max=self.spec.bins - 1)
            total = total + logprobs.gather(-1, token[:, None])[:, 0]
            tokens.append(token)
            if place + 1 < self.size:
                ids = self._ids(token[:, None])
                found = self.model(input_ids=ids, use_cache=True, **self._remembered(found))
        chosen = torch.stack(tokens, 1)[:, None]
        return chosen.short(), self.actions(chosen), total

    def evaluate(self, observations: Mapping[str, Tensor], choices: Tensor) -> Evaluation:
        """See `Policy`: one forward over prompt and action."""
        tokens = choices[:, 0].long()
        found = self._forward(observations, tokens)
        logprobs = self._of_actions(found.logits[:, -self.size - 1 : -1])
        chosen = logprobs.gather(-1, tokens[..., None])[..., 0].sum(1)
        entropy = -(logprobs.exp() * logprobs).sum((1, 2))
        return Evaluation(chosen, entropy, self._value(found, -self.size - 1))

    def values(self, observations: Mapping[str, Tensor]) -> Tensor:
        """See `Policy`."""
        return self._value(self._forward(observations, None), -1)

    def actor(self) -> TorchActor:
        """See `Policy`."""
        return TorchActor(self, Field((1, self.size), "int16"))

    def _forward(self, observations: Mapping[str, Tensor], tokens: Tensor | None) -> Any:
        pixels = self.pixels(observations["image"])
        ids = self._prompt(len(pixels))
        if tokens is not None:
            ids = torch.cat([ids, self._ids(tokens)], 1)
        return self.model(input_ids=ids, pixel_values=pixels, output_hidden_states=True)

    def _remembered(self, found: Any) -> dict[str, Any]:
        """What was computed so far, under the name that the model's forward gives it."""
        known = inspect.signature(self.model.forward).parameters
        name = "cache" if "cache" in known else "past_key_values"
        held = getattr(found, name, None)
        return {name: found.past_key_values if held is None else held}

    def _prompt(self, count: int) -> Tensor:
        device = self.value_head.weight.device
        return torch.tensor(self.spec.prompt_ids, device=device).expand(count, -1)

    def _ids(self, tokens: Tensor) -> Tensor:
        """Ids in the vocabulary of action tokens 0 to bins - 1, its last ones."""
        return tokens + self.spec.vocabulary - self.spec.bins

    def _of_actions(self, logits: Tensor) -> Tensor:
        """Log-probs among the action tokens alone, float32 [..., bins]: others are never drawn."""
        spec = self.spec
        first = spec.vocabulary - spec.bins
        return logits[..., first : spec.vocabulary].float().log_softmax(-1)

    def _value(self, found: Any, place: int) -> Tensor:
        value: Tensor = self.value_head(found.hidden_states[-1][:, place])[:, 0].float()
        return value
