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
"""Devices of a node; above eight nodes only whole nodes are tried for components of any size."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices and cores as one vector of resources.

    Attributes:
        devices: names, each ``type:index``.
        types: device types told apart by the profile; ("",) where it tells none apart.
        counts: how many of each type, and, where cores matter, how many cores; shape (resources,).
    """

    devices: tuple[str, ...]
    types: tuple[str, ...]
    counts: Counts

    @classmethod
    def of(cls, devices: DeviceNames, profile: Profile) -> "Machine":
        """The machine as far as the profile tells its parts apart."""
        names = device_names(devices)
        profiled = {t for entry in profile.components.values() for t in entry.types()}
        types: tuple[str, ...] = ("",)
        counts = [len(names)]
        if profiled - {""}:
            found = Counter(name.rpartition(":")[0] for name in names)
            types = tuple(t for t in found if t in profiled) or ("",)
            counts = [found[t] if t else len(names) for t in types]
        if profile.cores and any(entry.cores for entry in profile.components.values()):
            counts.append(int(profile.cores))
        return cls(names, types, np.array(counts, np.int64))

    @property
    def has_cores(self) -> bool:
        """Cores are one of the resources."""
        return len(self.counts) > len(self.types)


def any_size(count: int) -> Sequence[int]:
    """Sizes tried for a component that can run on any number of devices."""
    if count <= NODE * NODE:
        return range(1, count + 1)
    return [*(2**k for k in range(NODE.bit_length() - 1)), *range(NODE, count + 1, NODE)]
