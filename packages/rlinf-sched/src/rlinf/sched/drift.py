"""When to plan again: pure decisions over measured and predicted times.

Two rules. *Deviation*: every one of the last ``window`` iterations deviated from the prediction by
more than 15 %. *Gain*: over the horizon, the new plan saves more than twice what the switch costs,
at the mean and at one standard error around it, and the last switch is long enough ago.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

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
    """

    threshold: float = 0.15
    window: int = 8
    _planned: dict[str, float] = field(default_factory=dict)
    _seen: list[Factors] = field(default_factory=list)

    def step(self, seen: Observation) -> Replan | None:
        """See :class:`Rule`."""
        self._seen = [*self._seen[-self.window + 1 :], seen.factors]
        if len(self._seen) < self.window:
            return None
        for name in seen.factors:
            planned = self._planned.get(name, 1.0)
            ratios = [factors[name] / planned for factors in self._seen]
            if all(abs(ratio - 1) > self.threshold for ratio in ratios):
                factors = _means(self._seen)
                self._planned, self._seen = dict(factors), []
                shift = 100 * (factors[name] / planned - 1)
                why = f"{name} is {shift:+.0f} % off the prediction over {self.window} iterations"
                return Replan(seen.iteration, factors, why)
        return None


Saving = Callable[[Factors], tuple[float, object]]
"""Seconds an iteration that the best plan for these factors saves against the present one, and
something that stands for that plan."""


@dataclass(slots=True)
class GainRule:
    """The expected saving pays for the switch.

    Attributes:
        saving: see :data:`Saving`; it must price the plan in use at that moment.
        switch_s: seconds lost by a switch.
        horizon: iterations over which a saving counts.
        margin: the saving must be so many times the switch.
        window: iterations averaged.
        dwell: iterations to wait after a switch; it grows by half with every switch that undid
            an earlier one, and so ends flapping.
    """

    saving: Saving
    switch_s: float
    horizon: int = 50
    margin: float = 2.0
    window: int = 8
    dwell: int = 10
    _seen: list[Factors] = field(default_factory=list)
    _since: int = 1 << 30
    _wait: float = 0.0
    _past: list[object] = field(default_factory=list)

    def step(self, seen: Observation) -> Replan | None:
        """See :class:`Rule`."""
        self._since += 1
        self._seen = [*self._seen[-self.window + 1 :], seen.factors]
        self._forget_before_a_jump()
        if len(self._seen) < 3 or self._since < max(self.dwell, self._wait):
            return None
        mean, error = _means(self._seen), _errors(self._seen)
        guesses = [{n: mean[n] * (1 + k * error[n]) for n in mean} for k in (0, -1, 1)]
        priced = [self.saving(guess) for guess in guesses]
        least = self.horizon * min(seconds for seconds, _ in priced)
        if least <= self.margin * self.switch_s:
            return None
        self._note(priced[0][1])
        why = (
            f"saves at least {least:.0f} s over {self.horizon} iterations, costs {self.switch_s:g}"
        )
        return Replan(seen.iteration, mean, why, least)

    def _note(self, chosen: object) -> None:
        undone = chosen in self._past[:-1]
        self._wait = max(self.dwell, self._wait) * (4 if undone else 1)
        self._past.append(chosen)
        self._since = 0

    def _forget_before_a_jump(self) -> None:
        """After a jump the older half of the window would only delay the answer."""
        if len(self._seen) < 6:
            return
        old, new = self._seen[:-3], self._seen[-3:]
        spread, before, after = _errors(old), _means(old), _means(new)
        for name in after:
            noise = max(spread[name] * len(old) ** 0.5, 0.02)
            if abs(after[name] / before[name] - 1) > 4 * noise / 3**0.5:
                self._seen = new
                return


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


def _errors(seen: Sequence[Factors]) -> dict[str, float]:
    """Relative standard error of the mean."""
    found = {}
    for name in seen[-1]:
        values = np.array([f[name] for f in seen])
        spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        found[name] = spread / float(values.mean()) / len(values) ** 0.5
    return found
