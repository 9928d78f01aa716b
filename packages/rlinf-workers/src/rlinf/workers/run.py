"""A run folder: what a training run leaves behind, and what is seen while it goes on.

    metrics.jsonl     one line a step: the step's metrics as given to `Run.record`
    events.out.*      the same for TensorBoard
    curve.png         reward over steps, drawn again at the end
    plan.yaml         the plan which was executed last
    profile.yaml      the measurements it was made from, where it was searched for
    summary.json      the run in eight keys, written once when it ends well

Needs the `run` extra: rich, matplotlib and tensorboard, imported only when a run is opened.
"""

import json
import math
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import psutil

from rlinf.workers.errors import ConfigError

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from rlinf.sched import Plan
    from rlinf.workers.course import Decision

__all__ = ["Run", "Summary"]

SMOOTHED_STEPS = 5
LOOK_S = 1.0
"""Between two looks at the memory: a look takes milliseconds."""
QUEUE = 1000
"""Values that may wait for TensorBoard's thread: with a few, the program would wait for it."""
METRICS = "metrics.jsonl"
"""The file in a run's folder."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a run. Rewards are means over the first and the last five steps."""

    steps: int
    reward_first: float
    reward_last: float
    tokens_per_s: float
    """What the run counts (`counts` of `Run`; in the file the key is named after it), over the
    seconds of all steps."""
    seconds: float
    """From the opening of the run to its end, starting the workers and a warm-up included; of a run
    that was resumed, since then."""
    plan: str
    """The kind of the last plan: temporal, spatial, hybrid or single."""
    peak_rss_bytes: int
    """The largest sum, over this process and all below it, of resident memory at a step's end,
    looked at once a second at most. Pages which several processes share are counted for each."""


class Run:
    """Records the steps of one run into `folder` and shows how far it is.

    A `Journal` of `rlinf.workers.recovery`. `record` needs the metrics `tokens` (or what `counts`
    says) and `staleness`; it takes any further number. `reward` may be missing from a step in which
    none was known. Inside the context Ctrl-C lets the current step be the
    last one; a second Ctrl-C raises `KeyboardInterrupt` at once. Not thread-safe: the main thread
    drives a run.

    Args:
        folder: Where it is written; metrics of a run that was there before count until `go_back`.
        show: Whether its progress is shown: a bar in a terminal, or else lines.
        counts: The metric that says how much was done.
        title: Of the curve.
    """

    def __init__(
        self,
        folder: Path,
        *,
        show: bool = True,
        counts: str = "tokens",
        title: str = "Reward of sampled answers",
    ) -> None:
        self._counts, self._title = counts, title
        self._lines: list[dict[str, float]] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._metrics = (folder / METRICS).open("a+", encoding="utf-8")
            self._metrics.seek(0)
            self._lines = _complete_lines(self._metrics.read())
        except OSError as error:
            raise ConfigError(f"cannot write the run folder {folder}: {error.strerror}") from error
        from rlinf.workers.display import display

        self.folder = folder
        self._plan: Plan | None = None
        self._board: SummaryWriter | None = None
        self._peak_rss_bytes, self._looked = 0, -math.inf
        self._started = self._step_started = time.monotonic()
        self._stepping = self._stopping = False
        self._display = display(show)

    def __enter__(self) -> Self:
        self._previous_handler = signal.signal(signal.SIGINT, self._interrupted)
        self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous_handler)
        self._display.stop()
        self._metrics.close()
        if self._board is not None:
            self._board.close()

    def _interrupted(self, *_: object) -> None:
        if self._stopping or not self._stepping:
            raise KeyboardInterrupt
        self._stopping = True
        self._display.print("finishing this step; Ctrl-C again stops at once")

    @property
    def plan(self) -> "Plan | None":
        """The plan that is followed; None before there is one."""
        return self._plan

    @property
    def stopping(self) -> bool:
        """Ctrl-C was pressed: the step under way is the last one."""
        return self._stopping

    def begin(self, steps: int) -> None:
        """There will be so many steps; until then Ctrl-C ends the program at once."""
        self._display.begin(steps)

    def begin_step(self) -> None:
        """The time of a step counts from here."""
        self._stepping = True
        self._step_started = time.monotonic()

    def go_back(self, step: int) -> None:
        """Forget the metrics of all steps after this one, here and in the files."""
        from torch.utils.tensorboard import SummaryWriter

        if self._board is not None:
            self._board.close()
        self._board = SummaryWriter(str(self.folder), purge_step=step + 1, max_queue=QUEUE)
        self._lines = [line for line in self._lines if line["step"] <= step]
        self._metrics.truncate(0)
        self._metrics.writelines(json.dumps(line) + "\n" for line in self._lines)
        self._metrics.flush()
        self._display.show(step, "")

    def say(self, text: str) -> None:
        """Show what is being done where the progress of the steps will be."""
        self._display.say(text)

    def planned(self, decision: "Decision") -> None:
        """Keep the plan that is followed from now on, and show one that was searched for."""
        if decision.plan is None:
            self.say(decision.because)
            return
        self.say(f"{decision.plan.kind} plan, {decision.because}")
        self._plan = decision.plan
        decision.plan.save(self.folder / "plan.yaml")
        if decision.workflow is not None:
            decision.workflow.save(self.folder / "profile.yaml")
            self._display.print(report(decision))

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a finished step everywhere."""
        seconds = time.monotonic() - self._step_started
        assert self._board is not None, "go_back says where the run begins"
        line = {"step": step, "seconds": seconds, **metrics}
        self._lines.append(line)
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        if (now := time.monotonic()) > self._looked + LOOK_S:
            self._peak_rss_bytes, self._looked = max(self._peak_rss_bytes, _resident_bytes()), now
        unit = self._counts.replace("_", " ")
        shown = (
            f"reward {_mean(self._rewards()[-SMOOTHED_STEPS:]):.3f}"
            f"  {metrics[self._counts] / max(seconds, 1e-9):,.0f} {unit}/s"
            f"  staleness {metrics['staleness']:.0f}"
        )
        self._display.show(step, shown)

    def _rewards(self) -> list[float]:
        return [line["reward"] for line in self._lines if "reward" in line]

    def finish(self) -> Summary:
        """Draw the curve and write the summary."""
        seconds = time.monotonic() - self._started
        rewards = self._rewards()
        stepping = sum(line["seconds"] for line in self._lines)
        summary = Summary(
            steps=len(self._lines),
            reward_first=_mean(rewards[:SMOOTHED_STEPS]),
            reward_last=_mean(rewards[-SMOOTHED_STEPS:]),
            tokens_per_s=sum(n[self._counts] for n in self._lines) / max(stepping, 1e-9),
            seconds=seconds,
            plan=self._plan.kind if self._plan else "",
            peak_rss_bytes=self._peak_rss_bytes,
        )
        steps = [int(line["step"]) for line in self._lines if "reward" in line]
        _draw(steps, rewards, self._title, self.folder / "curve.png")
        rate = f"{self._counts}_per_s"
        plain = {rate if k == "tokens_per_s" else k: v for k, v in asdict(summary).items()}
        (self.folder / "summary.json").write_text(json.dumps(plain, indent=2) + "\n")
        self._display.print(
            f"reward {summary.reward_first:.3f} -> {summary.reward_last:.3f} over {summary.steps} "
            f"steps in {seconds:.0f} s; curve, metrics and checkpoints are in {self.folder}"
        )
        return summary


def report(decision: "Decision") -> str:
    """A decision for a person to read: why, what was tried, the plan and its explanation."""
    from rlinf.sched import explain

    assert decision.plan is not None and decision.workflow is not None
    tried = [
        f"  {plan.kind}: {plan.seconds or 0.0:.3f} s predicted, {seconds:.3f} s measured"
        for plan, seconds in decision.tried
    ]
    explanation = explain(decision.workflow, decision.plan).text()
    return "\n".join([f"plan: {decision.because}", *tried, explanation])


def _complete_lines(text: str) -> list[dict[str, float]]:
    """What can be read of a file of metrics; its last line may be torn."""
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _resident_bytes() -> int:
    """Resident memory of this process and of all that descend from it."""
    here = psutil.Process()
    total = 0
    for process in [here, *here.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _draw(steps: list[int], rewards: list[float], title: str, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends = range(1, len(rewards) + 1)
    smooth = [_mean(rewards[max(0, end - SMOOTHED_STEPS) : end]) for end in ends]
    axes.plot(steps, rewards, color="tab:blue", alpha=0.35, label="mean of the step's samples")
    axes.plot(steps, smooth, color="tab:blue", linewidth=2, label=f"mean of {SMOOTHED_STEPS} steps")
    axes.set(xlabel="step", ylabel="reward", title=title)
    if all(0 <= reward <= 1 for reward in rewards):
        axes.set(ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
