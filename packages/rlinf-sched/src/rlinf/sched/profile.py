"""What is known about each component: times, emission, memory, cores, switching."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rlinf.sched.errors import GraphError, ProfileError
from rlinf.sched.fit import Floats
from rlinf.sched.times import TimeTable

Law = Callable[[float, float], float]
"""Seconds from a number of devices and a number of items."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured run.

    Attributes:
        devices: how many it ran on.
        batch: items it worked through.
        seconds: how long that took.
        device_type: the type of those devices; "" where there is only one.
        free_bytes: memory it could use on each device; 0: all of it.
    """

    devices: int
    batch: float
    seconds: float
    device_type: str = ""
    free_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class ComponentProfile:
    """Everything measured about one component.

    Attributes:
        samples: measured runs; between them straight lines on log-log paper.
        law: seconds from (devices, items); replaces the samples.
        overhead_s: part of every call which does not depend on its items; used where only one
            batch size was measured.
        emission: fractions of the run's time at which the 1st, 2nd, ... of equal portions of the
            items have come out, increasing to 1; empty: evenly.
        emissions: the same by number of devices, where it differs; the nearest size counts.
        active_bytes: memory a device needs while the component works, on one device; it is
            divided by the number of devices.
        resident_bytes: the same while the component idles in memory.
        onload_s: to bring it into memory.
        offload_s: to take it out.
        cores: processor cores it keeps busy for every device.
    """

    samples: tuple[Sample, ...] = ()
    law: Law | None = None
    overhead_s: float = 0.0
    emission: tuple[float, ...] = ()
    emissions: tuple[tuple[int, tuple[float, ...]], ...] = ()
    active_bytes: float = 0.0
    resident_bytes: float = 0.0
    onload_s: float = 0.0
    offload_s: float = 0.0
    cores: float = 0.0

    def __post_init__(self) -> None:
        if self.law is None and not self.samples:
            raise ProfileError("times", "needs at least one sample, or a law")
        for given in (self.emission, *(curve for _, curve in self.emissions)):
            q = np.asarray(given, float)
            if len(q) and ((np.diff(q) < 0).any() or q[0] < 0 or abs(q[-1] - 1) > 1e-9):
                raise ProfileError("emission", "must increase, from 0 or more, to 1")

    @property
    def uneven(self) -> bool:
        """Its items do not come out evenly."""
        return bool(self.emission or self.emissions)

    def types(self) -> tuple[str, ...]:
        """Device types it was measured on."""
        return tuple(dict.fromkeys(sample.device_type for sample in self.samples)) or ("",)

    def runs_on(self, device_type: str) -> bool:
        """It was measured there, or on devices of no type, which stand for all."""
        return (
            not device_type
            or self.law is not None
            or not {device_type, ""}.isdisjoint(self.types())
        )

    def seconds(
        self, devices: Floats, batch: float, device_type: str = "", free_bytes: float = 0.0
    ) -> Floats:
        """Seconds to work through ``batch`` items on each number of ``devices``.

        Args:
            devices: shape (k,).
            free_bytes: memory for it on each device; 0: all.
        """
        if self.law is not None:
            return np.array([self.law(float(n), batch) for n in devices], float)
        tables = self.tables(device_type)
        logs = np.log(devices)
        curves = [table.at(logs, batch) for table in tables.values()]
        return between_memories(list(tables), curves, free_bytes or np.inf)

    def tables(self, device_type: str = "") -> dict[float, TimeTable]:
        """What was measured on one type of device, by the memory that was free; increasing."""
        typed, untyped = (
            [s for s in self.samples if s.device_type == kind] for kind in (device_type, "")
        )
        samples = typed or untyped or list(self.samples)
        levels = sorted({s.free_bytes or np.inf for s in samples})
        return {
            level: TimeTable.of(
                [
                    (s.devices, s.batch, s.seconds)
                    for s in samples
                    if (s.free_bytes or np.inf) == level
                ],
                self.overhead_s,
            )
            for level in levels
        }

    def covers(self, devices: int) -> bool:
        """Within four times of a measured size, or given by a law."""
        sizes = [s.devices for s in self.samples]
        return self.law is not None or min(sizes) / 4 <= devices <= max(sizes) * 4

    def emitted(self, parts: int, devices: float = 1) -> Floats:
        """Fraction of the run after which each of ``parts`` equal portions is out; (parts,)."""
        wanted = np.arange(1, parts + 1) / parts
        curve = self.emission
        if self.emissions:
            _, curve = min(self.emissions, key=lambda e: abs(math.log(e[0] / devices)))
        if not curve:
            return wanted
        shares = np.arange(1, len(curve) + 1) / len(curve)
        return np.asarray(np.interp(wanted, np.r_[0, shares], np.r_[0, curve]))

    def scaled(self, factor: float) -> "ComponentProfile":
        """The same component, ``factor`` times slower."""
        law = self.law
        return replace(
            self,
            samples=tuple(replace(s, seconds=s.seconds * factor) for s in self.samples),
            law=None if law is None else (lambda n, b: factor * law(n, b)),
            overhead_s=self.overhead_s * factor,
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile of the whole workflow.

    Attributes:
        components: by name.
        memory_bytes: of one device, by device type ("" for any); empty: memory does not matter.
        cores: processor cores in all; 0: they do not matter.
        sync_s: added to every iteration (weight synchronisation, data, control).
        rounds: how often the members of a cycle hand the batch round, by the cycle's name.
        node_devices: devices of one node; 0: not known.
    """

    components: Mapping[str, ComponentProfile]
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    cores: float = 0.0
    sync_s: float = 0.0
    rounds: Mapping[str, int] = field(default_factory=dict)
    node_devices: int = 0

    def __getitem__(self, name: str) -> ComponentProfile:
        if name not in self.components:
            known = ", ".join(self.components)
            raise GraphError(f"component {name!r} has no profile; profiled: {known}")
        return self.components[name]

    def memory(self, device_type: str) -> float:
        """Bytes of one device; infinite where nothing is said."""
        return self.memory_bytes.get(device_type, self.memory_bytes.get("", float("inf")))

    def scaled(self, factors: Mapping[str, float]) -> "Profile":
        """The same profile with some components slower or faster."""
        scaled = {
            name: entry.scaled(factors[name]) if name in factors else entry
            for name, entry in self.components.items()
        }
        return replace(self, components=scaled)

    @classmethod
    def from_laws(cls, laws: Mapping[str, Law]) -> "Profile":
        """A profile of plain functions ``seconds(devices, items)``."""
        return cls({name: ComponentProfile(law=law) for name, law in laws.items()})


def between_memories(levels: list[float], curves: list[Floats], free: float) -> Floats:
    """Times with ``free`` bytes, from the times at some levels of free memory."""
    if len(levels) == 1 or free >= levels[-1]:
        return curves[-1]
    if free <= levels[0]:
        return curves[0]
    upper = next(i for i, level in enumerate(levels) if level >= free)
    low, high = levels[upper - 1], levels[upper]
    share = 0.0 if not np.isfinite(high) else (free - low) / (high - low)
    return np.asarray(curves[upper - 1] * (1 - share) + curves[upper] * share)
