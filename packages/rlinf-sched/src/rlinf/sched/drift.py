"""When to plan again: pure decisions over measured and predicted times.

Two rules. *Deviation*: every one of the last ``window`` iterations deviated from the prediction by
more than 15 %. *Gain*: over the horizon, the new plan saves more than twice what the switch costs,
at the mean and at one standard error around it, and the last switch is long enough ago.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

MEMORY = 50
"""Iterations from which the noise is estimated."""

TREND = 150
"""Iterations through which a trend is drawn at most."""

LEAST = 60
"""And at least."""

SLOPE = 3.0
"""Standard errors from which a slope is a trend."""

JUMP = 5.0
"""Standard errors at which three iterations count as a jump."""

Factors = Mapping[str, float]
"""Measured over profiled seconds, by component."""


@dataclass(frozen=True, slots=True)
class Observation:
    """One iteration.

    Attributes:
        iteration: its number.
        factors: measured over profiled seconds of each component.
    """

    iteration: int
    factors: Factors


@dataclass(frozen=True, slots=True)
class Replan:
    """Plan again with the profile scaled by these factors.

    Attributes:
        because: what was seen, for the log.
        saving_s: expected over the horizon; 0 where the rule does not say.
    """

    iteration: int
    factors: Factors
    because: str
    saving_s: float = 0.0


class Rule(Protocol):
    """A re-planning rule: feed it every iteration, in order."""

    def step(self, seen: Observation) -> Replan | None:
        """Take note of an iteration, and say whether to plan again now."""
        ...


@dataclass(slots=True)
class DeviationRule:
    """A sustained deviation of any component over ``threshold``.

    Attributes:
        threshold: relative deviation from the times the plan was made for.
        window: so many iterations in a row must deviate.
        planned: the factors that the plan was made for, 1 where not given.
    """

    threshold: float = 0.15
    window: int = 8
    planned: Factors = field(default_factory=dict)
    _seen: list[Factors] = field(default_factory=list)

    def step(self, seen: Observation) -> Replan | None:
        """See :class:`Rule`."""
        self._seen = [*self._seen[-self.window + 1 :], seen.factors]
        if len(self._seen) < self.window:
            return None
        for name in seen.factors:
            planned = self.planned.get(name, 1.0)
            if all(abs(f[name] - planned) > self.threshold * planned for f in self._seen):
                factors = _means(self._seen)
                self.planned, self._seen = factors, []
                shift = 100 * (factors[name] - planned) / (planned or 1.0)
                why = f"{name} is {shift:+.0f} % off the prediction over {self.window} iterations"
                return Replan(seen.iteration, factors, why)
        return None


Saving = Callable[[Factors], tuple[float, object]]
"""Seconds an iteration that the best plan for these factors saves against the present one, and
something that stands for that plan."""


@dataclass(slots=True)
class GainRule:
    """The expected saving pays for the switch.

    Where times have a trend, the rule plans for where that leads in a part of the horizon. A drift
    that goes on in one direction is followed at once. When it turns round, the rule plans
    for the middle of the swing and waits ``patience`` times as long as that took, unless a
    component leaves the range its times have had so far: that is what ends flapping.

    Attributes:
        saving: see :data:`Saving`; it must price the plan in use at that moment.
        switch_s: seconds lost by a switch.
        horizon: iterations over which a saving counts.
        margin: the saving must be so many times the switch.
        window: iterations averaged.
        dwell: least iterations between two switches.
        patience: see above.
        new: relative distance from the range so far at which a time counts as new.
        new_after_turn: the same while it waits.
        sigmas: standard errors on either side of the mean at which it must pay too.
        new_sigmas: the same where a time is new.
        lead: how far along the horizon a trend is followed.
    """

    saving: Saving
    switch_s: float
    horizon: int = 50
    margin: float = 2.0
    window: int = 16
    dwell: int = 2
    patience: float = 40.0
    new: float = 0.05
    new_after_turn: float = 0.25
    sigmas: float = 2.0
    new_sigmas: float = 1.0
    lead: float = 0.25
    _seen: list[Factors] = field(default_factory=list)
    _past: list[Factors] = field(default_factory=list)
    _level: list[Factors] = field(default_factory=list)
    _since: int = 0
    _wait: float = 0.0
    _planned: list[Factors] = field(default_factory=list)
    _range: dict[str, tuple[float, float]] = field(default_factory=dict)

    def step(self, seen: Observation) -> Replan | None:
        """See :class:`Rule`."""
        self._since += 1
        self._seen = [*self._seen[-self.window + 1 :], seen.factors]
        self._past = [*self._past[-MEMORY + 1 :], seen.factors]
        self._level = [*self._level[-TREND + 1 :], seen.factors]
        noise = _noise(self._past)
        self._forget_before_a_jump(noise)
        if len(self._seen) < 3 or self._since < self.dwell:
            return None
        mean, error = self._expected(noise)
        is_new = self._is_new(mean)
        if self._since < self._wait and not is_new:
            return None
        sigmas = self.new_sigmas if is_new else self.sigmas
        guesses = [
            {n: mean[n] * max(0.1, 1 + k * sigmas * error[n]) for n in mean} for k in (0, -1, 1)
        ]
        least = self.horizon * min(self.saving(guess)[0] for guess in guesses)
        if least <= self.margin * self.switch_s:
            return None
        mean = self._note(mean)
        why = f"saves {least:.0f} s over {self.horizon} iterations, costs {self.switch_s:g} s"
        return Replan(seen.iteration, mean, why, least)

    def _expected(self, noise: Factors) -> tuple[dict[str, float], dict[str, float]]:
        """Factors to expect over the horizon, and their relative standard errors."""
        mean = _means(self._seen)
        error = {name: noise[name] / len(self._seen) ** 0.5 for name in mean}
        for name in mean:
            times = np.array([factors[name] for factors in self._level])
            count, spread = len(times), noise[name] * mean[name]
            steps = np.arange(count) - (count - 1) / 2
            slope_error = spread / max(1.0, float((steps**2).sum()) ** 0.5)
            slope = slope_error**2 * float((steps * times).sum()) / spread**2
            if count >= LEAST and abs(slope) > SLOPE * slope_error:
                ahead = (count - 1) / 2 + self.lead * self.horizon
                mean[name] = max(0.1 * mean[name], float(times.mean()) + ahead * slope)
                there = (spread**2 / count + (ahead * slope_error) ** 2) ** 0.5
                error[name] = there / mean[name]
        return mean, error

    def _is_new(self, mean: Factors) -> bool:
        for name, value in mean.items():
            low, high = self._range.get(name, (1.0, 1.0))
            margin = self.new_after_turn if self._wait else self.new
            if not low * (1 - margin) <= value <= high * (1 + margin):
                return True
        return False

    def _note(self, mean: dict[str, float]) -> dict[str, float]:
        """Remember a switch; at a turn settle between both ends of the swing, and wait."""
        before = self._planned[-1] if self._planned else dict.fromkeys(mean, 1.0)
        moved = max(mean, key=lambda name: abs(np.log(mean[name] / before[name])))
        turned = False
        if len(self._planned) > 0:
            earlier = self._planned[-2] if len(self._planned) > 1 else dict.fromkeys(mean, 1.0)
            swing = (mean[moved] - before[moved]) * (before[moved] - earlier[moved])
            turned = swing < 0
        self._wait = self.patience * self._since if turned else 0.0
        for name, value in mean.items():
            low, high = self._range.get(name, (1.0, 1.0))
            self._range[name] = min(low, value), max(high, value)
        if turned:
            mean = {name: float((value * before[name]) ** 0.5) for name, value in mean.items()}
        self._planned = [*self._planned[-1:], mean]
        self._since = 0
        return mean

    def _forget_before_a_jump(self, noise: Factors) -> None:
        """After a jump the older part of the window would only delay the answer."""
        if len(self._seen) < 6:
            return
        old, new = self._seen[:-3], self._seen[-3:]
        before, after = _means(old), _means(new)
        scale = (1 / len(old) + 1 / len(new)) ** 0.5
        jumps = (abs(np.log(after[n] / before[n])) > JUMP * noise[n] * scale for n in after)
        if any(jumps):
            self._seen, self._level = new, list(new)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a rule would have done on a recorded run.

    Attributes:
        seconds: of all iterations, with the switches.
        oracle_s: with the best plan in every iteration and free switches.
        replans: what it decided.
    """

    seconds: float
    oracle_s: float
    replans: tuple[Replan, ...]

    @property
    def excess(self) -> float:
        """Relative excess over the oracle."""
        return self.seconds / self.oracle_s - 1


class Planner(Protocol):
    """Prices plans under scaled profiles, for a replay."""

    def best(self, factors: Factors) -> object:
        """The best plan for these factors."""
        ...

    def seconds(self, plan: object, factors: Factors) -> float:
        """What a plan takes under these factors."""
        ...


def replay(
    truth: Sequence[Factors],
    measured: Sequence[Factors],
    planner: Planner,
    rule: Rule | Callable[[Callable[[], object]], Rule],
    *,
    switch_s: float,
    always_pay: bool = False,
) -> Replay:
    """Run a rule over a recorded trace.

    Args:
        truth: what each iteration really costs; without noise where known, else as measured.
        measured: what the rule sees.
        rule: a rule, or a function from "the plan in use" to a rule that needs to know it.
        switch_s: seconds lost by a switch.
        always_pay: a re-plan costs that even when the plan stays the same (full stop).
    """
    plan = planner.best(dict.fromkeys(truth[0], 1.0))
    current = [plan]
    judge = rule if hasattr(rule, "step") else rule(lambda: current[0])
    total = oracle = 0.0
    decided = []
    for k, (real, seen) in enumerate(zip(truth, measured, strict=True)):
        total += planner.seconds(current[0], real)
        oracle += planner.seconds(planner.best(real), real)
        replan = judge.step(Observation(k, seen))
        if replan is not None:
            chosen = planner.best(replan.factors)
            decided.append(replan)
            total += switch_s if always_pay or chosen != current[0] else 0.0
            current[0] = chosen
    return Replay(total, oracle, tuple(decided))


def _means(seen: Sequence[Factors]) -> dict[str, float]:
    return {name: float(np.mean([f[name] for f in seen])) for name in seen[-1]}


def _noise(seen: Sequence[Factors]) -> dict[str, float]:
    """Relative noise of one measurement, from neighbours: a drift hardly disturbs it."""
    found = {}
    for name in seen[-1]:
        steps = np.abs(np.diff(np.log([f[name] for f in seen])))
        # The median step of normal noise is 0.954 of its standard deviation.
        found[name] = max(0.02, float(np.median(steps)) / 0.954) if len(steps) > 4 else 0.1
    return found
