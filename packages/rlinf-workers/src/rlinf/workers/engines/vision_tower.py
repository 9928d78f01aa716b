"""The vision tower of a policy as a component of its own: when it learns, and who sees what of it.

    joint    with everything else, in every optimiser step
    frozen   never
    every    with everything else, but only in every k-th iteration
    late     beside everything else: from the gradients that an iteration left for its features,
             while the next iterations go on with features that are some versions old

In an iteration in which it does not learn with the rest, its features are computed once a picture
and version, and the passes over the minibatches see those.
"""

import copy
import hashlib
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from rlinf.workers.bounds import Count, Natural
from rlinf.workers.engines.optimiser import Optimiser, OptimiserConfig
from rlinf.workers.engines.parameters import load_state, state_of

__all__ = ["FeatureCache", "Sees", "VisionConfig", "VisionTower"]


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """How a policy's vision tower learns.

    Attributes:
        update: joint, frozen, every or late: see the module.
        every: Of `every`: iterations.
        staleness: Of `late`: iterations that features may be behind. The first pass over an
            iteration's decisions is what the tower learns from.
        cache_bytes: Of features that are kept.
    """

    update: Literal["joint", "frozen", "every", "late"] = "joint"
    every: Count = 4
    staleness: Natural = 1
    cache_bytes: Natural = 256 << 20


class Sees(Protocol):
    """A policy with a tower: where it is shown `features`, it does not look at `image`.

    Attributes:
        vision: Pictures uint8 [B, H, W, C] -> features [B, ...], which depend on nothing else.
    """

    vision: nn.Module


class FeatureCache:
    """Features by picture, of one version of a tower; another version forgets all of them.

    Attributes:
        hits: Pictures whose features were known.
        misses: Those that were computed.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._held = limit_bytes, 0
        self._version = -1
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()
        self.hits = self.misses = 0

    def features(self, tower: nn.Module, version: int, images: Tensor) -> Tensor:
        """Of uint8 [B, H, W, C], without a gradient; equal pictures are computed once."""
        if version != self._version:
            self._known.clear()
            self._version, self._held = version, 0
        if not len(images):  # a picture that is left out again says what features look like
            return _computed(tower, images.new_zeros(1, *images.shape[1:]))[:0]
        keys = [hashlib.blake2b(one.tobytes(), digest_size=16).digest() for one in images.numpy()]
        new = {key: row for row, key in enumerate(keys) if key not in self._known}
        self.hits, self.misses = self.hits + len(keys) - len(new), self.misses + len(new)
        made = dict(zip(new, _computed(tower, images[list(new.values())]), strict=True))
        rows = [made[key] if key in made else self._known[key] for key in keys]
        for key, features in made.items():
            self._keep(key, features)
        return torch.stack(rows)

    def _keep(self, key: bytes, features: Tensor) -> None:
        self._known[key] = features
        self._held += features.nbytes
        while self._held > self._limit:
            _, oldest = self._known.popitem(last=False)
            self._held -= oldest.nbytes


def _computed(tower: nn.Module, images: Tensor) -> Tensor:
    if not len(images):
        return torch.zeros(0)
    with torch.no_grad():
        found: Tensor = tower(images.to(next(tower.parameters()).device))
    return found.cpu()


Lesson = Sequence[tuple[Tensor, Tensor]]
"""Pictures and the gradient of their features, minibatch by minibatch."""


class VisionTower:
    """See the module. Not thread-safe; a late tower learns in a thread of its own, on a copy.

    Attributes:
        version: Changes of its weights.
    """

    def __init__(self, module: nn.Module, config: VisionConfig, optimiser: OptimiserConfig) -> None:
        self._module, self._config = module, config
        self.version = 0
        self.cache = FeatureCache(config.cache_bytes)
        self._taught: deque[Future[dict[str, Tensor]]] = deque()
        if config.update == "late":
            self._learner = copy.deepcopy(module)
            self._optimiser = Optimiser(self._learner.parameters(), optimiser)
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlinf-vision")

    def joins(self, iteration: int) -> bool:
        """Whether it learns with everything else in this iteration, counted from 0."""
        update = self._config.update
        return update == "joint" or (update == "every" and iteration % self._config.every == 0)

    @property
    def is_late(self) -> bool:
        """It wants lessons."""
        return self._config.update == "late"

    def adopt(self) -> None:
        """Go on from weights that somebody else has changed."""
        self.version += 1
        if self.is_late:
            load_state(state_of(self._learner), state_of(self._module))

    def joined(self) -> None:
        """It has learnt with everything else: what was known of it counts no more."""
        self.version += 1

    def look(self, shown: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is shown, [..., H, W, C] of pictures, with their features."""
        images = shown["image"]
        found = self.cache.features(self._module, self.version, images.flatten(0, -4))
        return {**shown, "features": found.view(*images.shape[:-3], *found.shape[1:])}

    def teach(self, lesson: Lesson) -> None:
        """Learn from it beside everything else. Begins only; `catch_up` brings what was learnt."""
        self._taught.append(self._thread.submit(self._learn, lesson))

    def catch_up(self, staleness: int | None = None) -> None:
        """Take over what was learnt; wait only for what may not be missing any longer.

        Args:
            staleness: Lessons that may be; None: as configured.
        """
        allowed = self._config.staleness if staleness is None else staleness
        while self._taught and (len(self._taught) > allowed or self._taught[0].done()):
            load_state(state_of(self._module), self._taught.popleft().result())
            self.version += 1

    def _learn(self, lesson: Lesson) -> dict[str, Tensor]:
        device = next(self._learner.parameters()).device
        for images, slopes in lesson:
            torch.autograd.backward(self._learner(images.to(device)), slopes.to(device))
        self._optimiser.step(float(len(lesson)))
        return {name: tensor.clone() for name, tensor in state_of(self._learner).items()}

    # -- state, for checkpoints; nothing may be under way ------------------------------------------

    def save(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Of a late tower what its learner keeps; of any other nothing but the version."""
        if not self.is_late:
            return {}, {"version": self.version}
        moments = self._optimiser.state([n for n, _ in self._learner.named_parameters()])
        return dict(moments), {"version": self.version, "calls": self._optimiser.calls}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, int]) -> None:
        """The inverse, once the module has its weights."""
        self._taught.clear()
        self.version = numbers["version"]
        self.cache = FeatureCache(self._config.cache_bytes)
        if self.is_late:
            load_state(state_of(self._learner), state_of(self._module))
            names = [name for name, _ in self._learner.named_parameters()]
            self._optimiser.load(names, tensors, numbers["calls"])
