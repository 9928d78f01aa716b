"""The course of planning: what to do before the next iteration, given what the last one showed.

A generator without I/O. It is sent every `Iteration` and yields a `Decision`:

    temporal, spatial   see what feeds what in one iteration, then make that plan
    a saved plan        follow it
    auto                see what feeds what; measure every component on all, half, a quarter ... of
                        the devices; search; try those plans which are predicted to be close; keep
                        the quickest; and plan again when the times drift away
"""

import statistics
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from rlinf.sched import (
    DeviationRule,
    GainRule,
    InfeasibleError,
    Observation,
    Placement,
    Plan,
    Replan,
    SearchConfig,
    Workflow,
    predict,
    search,
    spatial_plan,
    temporal_plan,
)
from rlinf.workers.bounds import Bounds, Count, NonNegative, Positive
from rlinf.workers.devices import for_each_group
from rlinf.workers.errors import ConfigError
from rlinf.workers.planning import (
    Iteration,
    Program,
    busy_s,
    foreseen_s,
    in_turn,
    placed,
    probes,
    workflow,
)

__all__ = ["Choice", "Course", "Decision", "PlanningConfig", "course"]

SLOWEST = 16
"""How many of the first windows the window grows to, where drifts turn round again and again."""


@dataclass(frozen=True, slots=True)
class PlanningConfig:
    """How a plan is looked for, and when again.

    Attributes:
        parts: Components are measured with whole iterations, and with chunks of this part of one.
        tries: Iterations for which a plan that is predicted to be close to the best is tried. The
            first of them only warms up.
        close: How much longer than the best a plan may be predicted to take, to be tried.
        rule: When to plan again: "deviation": a component was `threshold` off for `window`
            iterations; "gain": the saving pays for the switch; "never".
        threshold: Relative deviation.
        window: Iterations.
    """

    parts: Count = 8
    tries: Annotated[int, Bounds(2)] = 3
    close: NonNegative = 0.15
    rule: Literal["deviation", "gain", "never"] = "deviation"
    threshold: Positive = 0.15
    window: Count = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """What was asked for: a way to plan, or a plan."""

    how: Literal["temporal", "spatial", "auto", "saved"]
    plan: Plan | None = None

    @classmethod
    def of(cls, choice: str | Plan) -> "Choice":
        """Read it; see `FlowPlanner`.

        Raises:
            ConfigError: It is none of the words, and there is no such file.
            PlanError: The file does not hold a plan.
        """
        if isinstance(choice, Plan):
            return cls("saved", choice)
        if choice in ("temporal", "spatial", "auto"):
            return cls(choice)  # type: ignore[arg-type]
        if not Path(choice).is_file():
            raise ConfigError(
                f"plan={choice}: not temporal, spatial or auto, and there is no such file"
            )
        return cls("saved", Plan.load(choice))


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do before the next iteration.

    Attributes:
        because: Why, in a few words.
        placements: Where every component is from now on; None: where it is.
        batch: Items of an iteration; None: not known yet.
        plan: The plan that is followed from now on; None while plans are being looked for.
        workflow: What it was made from; None where it was not searched for.
        tried: Plans that were compared, and the seconds an iteration took with each.
    """

    because: str
    placements: Mapping[str, Placement] | None = None
    batch: int | None = None
    plan: Plan | None = None
    workflow: Workflow | None = None
    tried: tuple[tuple[Plan, float], ...] = ()


Course = Generator[Decision, Iteration, None]
STAY = Decision("all is as planned")
KINDS = ("", "temporal", "spatial", "hybrid")


def course(
    choice: Choice,
    config: PlanningConfig,
    devices: Sequence[str],
    ranks: Mapping[str, int],
    cores: int = 0,
) -> Course:
    """The decisions for a program, one before each iteration.

    Args:
        devices: All that may be used.
        ranks: The components that can be placed, and how many workers each has.
        cores: Processor cores, which matter beside devices of another kind.

    Raises:
        ConfigError: A saved plan is for other components.
    """
    if choice.plan is not None:
        return _saved(choice.plan, devices, ranks)
    return _found(choice, config, tuple(devices), ranks, cores)


def _saved(plan: Plan, devices: Sequence[str], ranks: Mapping[str, int]) -> Course:
    places = plan.placements()
    if set(places) != set(ranks):
        raise ConfigError(
            f"the plan is for the groups {', '.join(places)}, the program has {', '.join(ranks)}"
        )
    first = yield Decision("as saved", places, plan.batch)
    program = Program.of(first.records, ranks, len(devices))
    made_for = "" if program.batch == plan.batch else f", for {plan.batch} items an iteration"
    because = f"as saved{made_for}"
    yield Decision(because, placed(plan, program), program.batch, plan)
    yield from _stay()


def _found(
    choice: Choice,
    config: PlanningConfig,
    devices: tuple[str, ...],
    ranks: Mapping[str, int],
    cores: int,
) -> Course:
    shared = for_each_group(devices, ranks.values())
    first = yield Decision("to see what feeds what", in_turn(tuple(ranks), shared))
    program = Program.of(first.records, ranks, len(shared))
    if choice.how == "auto":
        yield from _auto(program, config, shared, cores)
        return
    if choice.how == "temporal":
        plan = temporal_plan(program.graph, shared, program.batch)
    else:
        needed = sum(ranks.values())
        apart = shared if len(shared) >= needed else devices[:needed]
        plan = spatial_plan(program.graph, apart, program.batch, micro_batches=program.batch)
    yield Decision("as asked for", placed(plan, program), program.batch, plan)
    yield from _stay()


def _stay() -> Course:
    while True:
        yield STAY


def _auto(program: Program, config: PlanningConfig, devices: tuple[str, ...], cores: int) -> Course:
    measured: list[Iteration] = []
    wanted = probes(program, devices, config.parts)
    for number, probe in enumerate(wanted, 1):
        because = f"profiling, {number} of {len(wanted)}"
        iteration = yield Decision(because, probe.placements, program.batch)
        if probe.counts:
            measured.append(iteration)
    known = workflow(program, measured, devices, cores)
    search = _Search(program, config, known, max(i.moved_s for i in measured))
    followed = yield from search.first()
    while True:
        followed = yield from search.next(followed)


@dataclass(frozen=True, slots=True)
class _Trial:
    """What iterations with a plan showed: seconds of one, and how long each component was busy."""

    plan: Plan
    seconds: float
    busy: Mapping[str, float]

    @classmethod
    def of(cls, plan: Plan, seen: Sequence[Iteration]) -> "_Trial":
        busy = {
            name: statistics.fmean(busy_s(name, iteration) for iteration in seen)
            for name in seen[0].placements
        }
        return cls(plan, statistics.median(iteration.seconds for iteration in seen), busy)


class _Search:
    """Finds the plan for what is known of a program, and the next when that changes.

    Every plan is tried before it is followed, and a deviation is one from its trial: that it takes
    longer than was foreseen is no change of the program.
    """

    def __init__(
        self, program: Program, config: PlanningConfig, known: Workflow, switch_s: float
    ) -> None:
        self._program, self._config, self._known = program, config, known
        self._plan: Plan | None = None
        self._bias: dict[str, float] = {}
        """Measured over predicted seconds, by the kind of plan; side by side stages slow each other
        down in ways that no profile of a single one shows."""
        self._rule = self._make_rule(switch_s)
        self._rose: bool | None = None

    def first(self) -> Generator[Decision, Iteration, _Trial]:
        """Try the plans that are predicted to be close, and follow the quickest."""
        tried = yield from self._try_all(self._close(self._known), self._known)
        return (yield from self._follow("the quickest of those tried", tried, self._known))

    def next(self, followed: _Trial) -> Generator[Decision, Iteration, _Trial]:
        """Follow a plan until the rule wants another; then see whether that is quicker."""
        drift, seen = yield from self._drift(followed.plan)
        known = replace(self._known, profile=self._known.profile.scaled(drift.factors))
        here = _Trial.of(followed.plan, seen)
        self._learn(here, known)
        self._note_turn(here.seconds > followed.seconds)
        before = placed(here.plan, self._program)
        rivals = [p for p in self._close(known) if placed(p, self._program) != before]
        if not rivals:
            why = f"{drift.because}; the plan is still the best"
            return (yield from self._follow(why, [here], known))
        tried = yield from self._try_all(rivals, known)
        quicker = min(trial.seconds for trial in tried) < here.seconds
        why = "" if quicker else "; what was planned anew was no quicker"
        return (yield from self._follow(f"{drift.because}{why}", [here, *tried], known))

    def _follow(
        self, because: str, tried: Sequence[_Trial], known: Workflow
    ) -> Generator[Decision, Iteration, _Trial]:
        """The quickest of those tried, from now on."""
        best = min(tried, key=lambda trial: trial.seconds)
        self._plan = best.plan
        if isinstance(self._rule, DeviationRule):
            factors = self._factors(best.plan, best.busy)
            # Of what did nothing while the plan was tried, the profile is all that is known.
            self._rule.planned = {name: factor for name, factor in factors.items() if factor}
        places, batch = placed(best.plan, self._program), self._program.batch
        took = tuple((trial.plan, trial.seconds) for trial in tried)
        yield Decision(because, places, batch, best.plan, known, took if len(took) > 1 else ())
        return best

    def _try_all(
        self, plans: Sequence[Plan], known: Workflow
    ) -> Generator[Decision, Iteration, list[_Trial]]:
        tried = []
        for plan in plans:
            tried.append((yield from self._try(plan)))
            self._learn(tried[-1], known)
        return tried

    def _try(self, plan: Plan) -> Generator[Decision, Iteration, _Trial]:
        """The first iteration with a plan warms up."""
        taken = []
        for _ in range(self._config.tries):
            places = placed(plan, self._program)
            because = f"trying a {plan.kind} plan"
            taken.append((yield Decision(because, places, self._program.batch)))
        return _Trial.of(plan, taken[1:])

    def _drift(self, plan: Plan) -> Generator[Decision, Iteration, tuple[Replan, list[Iteration]]]:
        """Iterations as planned, until the rule is not content; the last of them."""
        seen: list[Iteration] = []
        number = 0
        while True:
            iteration = yield STAY
            number += 1
            seen = [*seen[1 - self._config.window :], iteration]
            factors = self._factors(plan, _Trial.of(plan, [iteration]).busy)
            if self._rule is None or not all(factors.values()):
                continue
            replan = self._rule.step(Observation(number, factors))
            if replan is not None:
                return replan, seen

    def _note_turn(self, rose: bool) -> None:
        """A drift that turned round must last twice as long the next time: what swings to and fro
        is soon followed but now and then. (The gain rule sees to that itself.)
        """
        if isinstance(self._rule, DeviationRule) and self._rose is not None and self._rose != rose:
            self._rule.window = min(2 * self._rule.window, SLOWEST * self._config.window)
        self._rose = rose

    def _factors(self, plan: Plan, busy: Mapping[str, float]) -> dict[str, float]:
        """Measured over predicted seconds of each component."""
        expected = predict(self._known, plan).busy_s
        return {name: busy[name] / max(seconds, 1e-9) for name, seconds in expected.items()}

    def _make_rule(self, switch_s: float) -> DeviationRule | GainRule | None:
        config = self._config
        if config.rule == "deviation":
            return DeviationRule(config.threshold, config.window)
        return GainRule(self._saving, switch_s) if config.rule == "gain" else None

    def _saving(self, factors: Mapping[str, float]) -> tuple[float, Plan]:
        """Seconds an iteration that the best plan for these factors saves."""
        assert self._plan is not None
        known = replace(self._known, profile=self._known.profile.scaled(factors))
        best = self._rivals(known)[0]
        return self._price(self._plan, known) - self._price(best, known), best

    def _close(self, known: Workflow) -> list[Plan]:
        """Of the best plan of each kind those that are predicted to be close to the best of all."""
        rivals = self._rivals(known)
        limit = self._price(rivals[0], known) * (1 + self._config.close)
        return [plan for plan in rivals if self._price(plan, known) <= limit]

    def _rivals(self, known: Workflow) -> list[Plan]:
        """The best plan of each kind, the best of all first."""
        found: dict[str, Plan] = {}
        for kind in KINDS:
            settings = SearchConfig(kind=kind)
            try:
                plan = search(known.graph, known.profile, known.devices, known.batch, settings)
            except InfeasibleError:
                continue
            found.setdefault(plan.kind, plan)
        return sorted(found.values(), key=lambda plan: self._price(plan, known))

    def _price(self, plan: Plan, known: Workflow) -> float:
        return foreseen_s(known, plan) * self._bias.get(plan.kind, 1.0)

    def _learn(self, trial: _Trial, known: Workflow) -> None:
        self._bias[trial.plan.kind] = trial.seconds / foreseen_s(known, trial.plan)
