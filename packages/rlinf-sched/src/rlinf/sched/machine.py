"""What there is to plan on: devices by type, and processor cores."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlinf.sched.plan import DeviceNames, device_names
from rlinf.sched.profile import Profile

Counts = npt.NDArray[np.int64]

NODE = 8
"""Devices of a node where nothing is said about nodes."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices and cores as one vector of resources.

    Attributes:
        devices: names, each ``type:index``.
        types: device types told apart by the profile; ("",) where it tells none apart.
        counts: how many of each type, and, where cores matter, how many cores; shape (resources,).
        node: devices of one node; 0: not known.
    """

    devices: tuple[str, ...]
    types: tuple[str, ...]
    counts: Counts
    node: int = 0

    @classmethod
    def of(cls, devices: DeviceNames, profile: Profile) -> "Machine":
        """The machine as far as the profile tells its parts apart."""
        names = device_names(devices)
        profiled = {t for entry in profile.components.values() for t in entry.types()}
        types: tuple[str, ...] = ("",)
        counts = [len(names)]
        if profiled - {""}:
            found = Counter(name.rpartition(":")[0] for name in names)
            types = tuple(t for t in found if t in profiled or "" in profiled) or ("",)
            counts = [found[t] if t else len(names) for t in types]
        if profile.cores and any(entry.cores for entry in profile.components.values()):
            counts.append(int(profile.cores))
        return cls(names, types, np.array(counts, np.int64), profile.node_devices)

    @property
    def has_cores(self) -> bool:
        """Cores are one of the resources."""
        return len(self.counts) > len(self.types)


def any_size(count: int, node: int = 0) -> Sequence[int]:
    """Sizes tried for a component that can run on any number of devices.

    Above eight nodes' worth of devices: powers of two within a node, and whole nodes.
    """
    node = node or NODE
    if count <= node * NODE:
        return range(1, count + 1)
    return [*(2**k for k in range((node - 1).bit_length())), *range(node, count + 1, node)]
