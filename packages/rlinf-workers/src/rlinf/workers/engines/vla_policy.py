"""A vision-language-action policy of any size: one forward for tokens, log-probs and the value.

    [value] [patch ...] [word ...] [state] [action token ...]  ->  transformer

Every token of the action chunk is a place of its own whose answer is a distribution over bins, all
in parallel, as in OpenVLA-OFT (Kim et al. 2025, arXiv:2502.19645, section 4); the answer of the
first place is the value of what is shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlinf.workers.bounds import Count, Natural
from rlinf.workers.engines.action_tokens import evaluate_tokens, sample_tokens, token_values
from rlinf.workers.engines.torch_actor import TorchActor
from rlinf.workers.errors import ConfigError
from rlinf.workers.random_state import seeded
from rlinf.workers.roles.policy import Evaluation
from rlinf.workers.roles.simulator import Field, Spaces

__all__ = ["VlaPolicy", "VlaSizes"]


@dataclass(frozen=True, slots=True)
class VlaSizes:
    """Of a `VlaPolicy`.

    Attributes:
        width: Of the transformer.
        layers: Its depth.
        heads: Its attention heads.
        patch: Edge of an image patch, which divides height and width.
        vision_layers: Depth of a transformer over the patches alone; 0: none.
        words: Ids of an instruction are below this; 0 pads.
        bins: Values of each number of an action.
        chunk: Actions of a decision.
    """

    width: Count = 64
    layers: Count = 2
    heads: Count = 4
    patch: Count = 16
    vision_layers: Natural = 0
    words: Count = 1024
    bins: Count = 16
    chunk: Count = 4


class VlaPolicy(nn.Module):
    """A `Policy` over `image`, `instruction` and `state`; at least `image` or `state` is shown.

    With an `image` it is a `Sees`: its vision tower may be a component of its own.
    """

    values_of_tokens: Tensor

    def __init__(self, sizes: VlaSizes, spaces: Spaces, seed: int = 0) -> None:
        super().__init__()
        shown = spaces.observation
        if not {"image", "state"} & set(shown):
            raise ConfigError(f"policy.name=vla needs an image or a state, not {', '.join(shown)}")
        self.sizes, self._action_size = sizes, spaces.action_size
        with seeded(seed):
            self._build(sizes, spaces)
        tokens = token_values(spaces.low, spaces.high, sizes.bins)
        self.register_buffer("values_of_tokens", tokens, persistent=False)

    def _build(self, sizes: VlaSizes, spaces: Spaces) -> None:
        width, shown, places = sizes.width, spaces.observation, 1
        if "image" in shown:
            self.vision = Vision(shown["image"], sizes)
            places += self.vision.patches
        if "instruction" in shown:
            self.words = nn.Embedding(sizes.words, width, padding_idx=0)
            places += shown["instruction"].shape[0]
        if "state" in shown:
            count = shown["state"].shape[0]
            self.state = nn.Sequential(nn.Linear(count, width), nn.GELU(), nn.Linear(width, width))
            # Parameters, though nothing learns them: they travel with the weights.
            self.state_mean = nn.Parameter(torch.zeros(count), requires_grad=False)
            self.state_std = nn.Parameter(torch.ones(count), requires_grad=False)
            places += 1
        self._tokens = sizes.chunk * self._action_size
        self.begin = nn.Parameter(torch.zeros(1, 1, width))
        self.ask = nn.Parameter(0.02 * torch.randn(1, self._tokens, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, places + self._tokens, width))
        self.trunk = _transformer(sizes, sizes.layers)
        self.norm = nn.LayerNorm(width)
        self.head, self.value_head = nn.Linear(width, sizes.bins), nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, observations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits [B, C, A, bins] and values [B]."""
        count = len(next(iter(observations.values())))
        parts = [self.begin.expand(count, -1, -1)]
        if "features" in observations:
            parts.append(observations["features"])
        elif "image" in observations:
            parts.append(self.vision(observations["image"]))
        if "instruction" in observations:
            parts.append(self.words(observations["instruction"].long()))
        if "state" in observations:
            scaled = (observations["state"] - self.state_mean) / self.state_std
            parts.append(self.state(scaled)[:, None])
        seen = torch.cat([*parts, self.ask.expand(count, -1, -1)], 1) + self.place
        hidden = self.norm(self.trunk(seen))
        logits = self.head(hidden[:, -self._tokens :])
        shape = (count, self.sizes.chunk, self._action_size, self.sizes.bins)
        return logits.view(shape), self.value_head(hidden[:, 0])[:, 0]

    def draw(
        self, observations: Mapping[str, Tensor], noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Draws`."""
        tokens, logprobs = sample_tokens(self(observations)[0], noise)
        return tokens.short(), self.actions(tokens), logprobs

    def actions(self, tokens: Tensor) -> Tensor:
        """What tokens [B, C, A] mean, float32 of the same shape."""
        table = self.values_of_tokens.expand(*tokens.shape[:2], -1, -1)
        return table.gather(-1, tokens[..., None])[..., 0]

    def tokens(self, actions: Tensor) -> Tensor:
        """The nearest tokens of actions [B, C, A]: what demonstrations are imitated by."""
        return (actions[..., None] - self.values_of_tokens).abs().argmin(-1)

    def fit(self, observations: Mapping[str, Tensor]) -> None:
        """See `Imitates`."""
        if "state" in observations:
            self.state_mean.copy_(observations["state"].mean(0))
            self.state_std.copy_(observations["state"].std(0).clamp(min=1e-3))

    def sharpen(self, factor: float) -> None:
        """See `Imitates`."""
        with torch.no_grad():
            self.head.weight.mul_(factor)
            self.head.bias.mul_(factor)

    def evaluate(self, observations: Mapping[str, Tensor], choices: Tensor) -> Evaluation:
        """See `Policy`."""
        logits, values = self(observations)
        return Evaluation(*evaluate_tokens(logits, choices), values)

    def values(self, observations: Mapping[str, Tensor]) -> Tensor:
        """See `Policy`."""
        found: Tensor = self(observations)[1]
        return found

    def actor(self) -> TorchActor:
        """See `Policy`."""
        return TorchActor(self, Field((self.sizes.chunk, self._action_size), "int16"))


class Vision(nn.Module):
    """The vision tower: pictures uint8 [B, H, W, 3] -> one vector a patch, [B, patches, width]."""

    def __init__(self, image: Field, sizes: VlaSizes) -> None:
        super().__init__()
        (height, wide, channels), patch = image.shape, sizes.patch
        if height % patch or wide % patch:
            raise ConfigError(f"policy.vla.patch={patch} does not divide pictures of {image.shape}")
        self.patches = (height // patch) * (wide // patch)
        self.embed = nn.Conv2d(channels, sizes.width, patch, patch)
        if sizes.vision_layers:
            self.place = nn.Parameter(0.02 * torch.randn(1, self.patches, sizes.width))
            self.trunk = _transformer(sizes, sizes.vision_layers)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        scaled = images.movedim(-1, 1).float() / 127.5 - 1
        found: Tensor = self.embed(scaled).flatten(2).mT
        return self.trunk(found + self.place) if hasattr(self, "trunk") else found


def _transformer(sizes: VlaSizes, layers: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        sizes.width, sizes.heads, 4 * sizes.width, 0.0, "gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
