"""The commands ``rlinf-sched`` and ``rlinf-profiler``."""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rlinf.sched import gantt, trace
from rlinf.sched.activities import activities, shares
from rlinf.sched.arguments import JITTER, sched_parser
from rlinf.sched.config import TRACED, traced_environment
from rlinf.sched.errors import SchedError
from rlinf.sched.explanation import best_of_kind, explain, robust_plan
from rlinf.sched.flips import Flip
from rlinf.sched.improvements import improvements
from rlinf.sched.plan import MOST_DEVICES, Plan
from rlinf.sched.planner import search
from rlinf.sched.recorded import replay_trace, workflow_of
from rlinf.sched.report import comparison, figures, report
from rlinf.sched.simulation import Reality, simulate
from rlinf.sched.traffic import traffic
from rlinf.sched.workflow import Workflow

INTERRUPTED = 130
"""What a shell reports for a command that Ctrl-C ended."""

UNREAD = 141
"""The same where nobody reads its output any more, as after ``| head``."""

PERFETTO = "perfetto.json.gz"

SAVERS = {".png": gantt.save_png, ".html": gantt.save_html, ".json": gantt.save_chrome_trace}


def main(arguments: Sequence[str] | None = None) -> int:
    """``rlinf-sched``: returns 0, or 2 with a message on the error stream."""
    options = sched_parser().parse_args(arguments)

    def run() -> int:
        data, text = _COMMANDS[options.command](options, _workflow(options))
        print(json.dumps(data, indent=2) if options.json else text)
        return 0

    return _reported("rlinf-sched", run)


def profiler_main(arguments: Sequence[str] | None = None) -> int:
    """``rlinf-profiler``: returns the traced command's own status, or 2 on an error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = {"report": _report, "compare": _compare_traces}.get(given[0] if given else "")
    return _reported("rlinf-profiler", lambda: chosen(given[1:]) if chosen else _trace(given))


def _reported(program: str, run: Callable[[], int]) -> int:
    """Run, and say in one line on the error stream what went wrong."""
    try:
        status = run()
        print(end="", flush=True)
        return status
    except BrokenPipeError:
        # What is still buffered would fail again when Python closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
    except SchedError as problem:
        print(f"{program}: {problem}", file=sys.stderr)
    except OSError as problem:
        where = f"{problem.filename}: " if problem.filename else ""
        print(f"{program}: {where}{problem.strerror or problem}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 2


def _workflow(options: argparse.Namespace) -> Workflow:
    workflow = Workflow.load(options.workflow)
    if options.gpus is None:
        return workflow
    if not 1 <= options.gpus <= MOST_DEVICES:
        raise SchedError(f"--gpus must be positive, at most {MOST_DEVICES:,}, is {options.gpus}")
    return workflow.on(options.gpus)


def _chosen(options: argparse.Namespace, workflow: Workflow) -> Plan:
    if not options.plan:
        return _best(workflow)
    plan = Plan.load(options.plan)
    if options.gpus not in (None, len(plan.devices)):
        count = len(plan.devices)
        raise SchedError(f"--gpus {options.gpus}: the plan {options.plan} is for {count} devices")
    _same_components(options.plan, plan, workflow)
    return plan


def _same_components(path: str, plan: Plan, workflow: Workflow) -> None:
    planned, known = set(plan.placements()), set(workflow.graph.names)
    if planned != known:
        lacks = ", ".join(sorted(known - planned)) or "nothing"
        more = ", ".join(sorted(planned - known)) or "nothing"
        raise SchedError(f"the plan {path} is for another workflow: lacks {lacks}, has {more} more")


def _best(workflow: Workflow) -> Plan:
    return search(
        workflow.graph,
        workflow.profile,
        workflow.devices,
        workflow.batch,
        staleness=workflow.staleness,
    )


Answer = tuple[object, str]


def _plan(options: argparse.Namespace, workflow: Workflow) -> Answer:
    note = ""
    if options.robust:
        plan, excess = robust_plan(workflow, noise=options.robust)
        note = f"\nmean excess over each profile's own best: {100 * excess:.2f} %"
    else:
        plan = _best(workflow)
    if options.output:
        plan.save(options.output)
    return plan.to_dict(), plan.tree() + note


def _simulate(options: argparse.Namespace, workflow: Workflow) -> Answer:
    if options.seed < 0:
        raise SchedError(f"--seed must not be negative, is {options.seed}")
    saver = SAVERS.get(Path(options.draw).suffix) if options.draw else None
    if options.draw and saver is None:
        raise SchedError(f"--draw {options.draw}: know {', '.join(SAVERS)}")
    plan = _chosen(options, workflow)
    reality = Reality.load(options.reality) if options.reality else Reality(jitter=JITTER)
    if options.jitter is not None:
        reality = replace(reality, jitter=options.jitter)
    result = simulate(
        plan,
        workflow.graph,
        workflow.profile,
        reality,
        iterations=options.iterations,
        seed=options.seed,
    )
    if saver is not None:
        saver(plan, result.last, options.draw)
    data = {
        "predicted_s": result.predicted_s,
        "simulated_s": result.seconds.tolist(),
        "error": result.error,
    }
    text = (
        f"{plan.tree()}\npredicted {result.predicted_s:.3f} s, simulated "
        f"{result.seconds.mean():.3f} s over {options.iterations} iterations "
        f"(prediction {100 * result.error:+.2f} %)"
    )
    return data, text


def _explain(options: argparse.Namespace, workflow: Workflow) -> Answer:
    plan = _chosen(options, workflow)
    # A plan is compared with others for what it was made for.
    workflow = replace(workflow, devices=plan.devices, batch=plan.batch)
    done = itertools.count(1)
    total = len(workflow.profile.components)

    def watch(flip: Flip) -> None:
        if sys.stderr.isatty():
            line = f"how far times may move: {next(done)} of {total} components, {flip.component}"
            print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)

    try:
        found = explain(workflow, plan, watch=watch)
    finally:
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
    flips = [asdict(flip) for flip in found.flips]
    for flip in flips:
        flip["slower"] = None if flip["slower"] == float("inf") else flip["slower"]
    return {**asdict(found), "plan": found.plan.to_dict(), "flips": flips}, found.text()


def _compare(options: argparse.Namespace, workflow: Workflow) -> Answer:
    found = best_of_kind(workflow)
    for path in options.plans:
        plan = Plan.load(path)
        _same_components(path, plan, workflow)
        if plan.batch != workflow.batch:
            raise SchedError(f"the plan {path} is for batch {plan.batch}, not {workflow.batch}")
        result = simulate(plan, workflow.graph, workflow.profile, Reality(), iterations=1)
        found[path] = result.predicted_s
    best = min(found.values())
    rows = sorted(found.items(), key=lambda item: item[1])
    lines = [f"{name:20s} {s:10.3f} s  {100 * (s / best - 1):+6.1f} %" for name, s in rows]
    return found, "\n".join(lines)


def _replay(options: argparse.Namespace, workflow: Workflow) -> Answer:
    spans = trace.load_trace(options.trace)
    found = replay_trace(spans, workflow, rule=options.rule, switch_s=options.switch)
    data = {
        "seconds": found.seconds,
        "oracle_s": found.oracle_s,
        "excess": found.excess,
        "replans": [asdict(replan) for replan in found.replans],
    }
    lines = [f"iteration {replan.iteration}: {replan.because}" for replan in found.replans]
    lines.append(
        f"{len(found.replans)} re-plans; {found.seconds:.2f} s, {100 * found.excess:.2f} % above "
        "the best plan in every iteration"
    )
    return data, "\n".join(lines)


_COMMANDS = {
    "plan": _plan,
    "simulate": _simulate,
    "explain": _explain,
    "compare": _compare,
    "replay": _replay,
}


def _trace(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlinf-profiler",
        description="Run a command with tracing and say where its time went.",
        epilog="rlinf-profiler report TRACE: the same for a trace recorded earlier; "
        "rlinf-profiler compare BEFORE AFTER: what differs between two.",
    )
    parser.add_argument(
        "--trace",
        required=True,
        choices=TRACED,
        help="what is recorded: messages between workers, chunks of stages, or both",
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="keep the trace here, and one file for Perfetto"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- COMMAND ...")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("give the command to run after --")
    with tempfile.TemporaryDirectory(prefix="rlinf-trace-") as scratch:
        folder = Path(options.output or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        environment = traced_environment(folder, (options.trace,))
        try:
            done = subprocess.run(command, env=environment, check=False)
        except OSError as problem:
            raise SchedError(f"cannot run {command[0]!r}: {problem.strerror}") from problem
        print(report(trace.load_trace(folder)))
        if options.output:
            print(f"\nfor Perfetto: {trace.save_perfetto(folder, folder / PERFETTO)}")
    return done.returncode


def _report(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="rlinf-profiler report")
    parser.add_argument("trace", help="a trace file, or a folder of them")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--workflow", metavar="FILE", help="write a workflow to plan from")
    parser.add_argument("--perfetto", metavar="FILE", help="write one file (.json.gz) for Perfetto")
    options = parser.parse_args(arguments)
    spans = trace.load_trace(options.trace)
    if options.workflow:
        workflow_of(spans).save(options.workflow)
    if options.perfetto:
        trace.save_perfetto(options.trace, options.perfetto)
    if options.json:
        print(json.dumps(_as_data(spans), indent=2))
    else:
        print(report(spans))
    return 0


def _as_data(spans: Sequence[trace.Span]) -> dict[str, object]:
    """The report for programs."""
    found = activities(spans)
    return {
        "wall_s": trace.wall_s(spans),
        "totals": [asdict(total) for total in trace.totals(spans)],
        "workers": [asdict(one) | {"idle": one.idle} for one in shares(found)] if found else [],
        "traffic": [asdict(one) for one in traffic(spans)],
        "improvements": [asdict(one) for one in improvements(found)],
    }


def _compare_traces(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rlinf-profiler compare", description="What differs between two traces."
    )
    parser.add_argument("before", help="a trace file, or a folder of them")
    parser.add_argument("after", help="another")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    before, after = (figures(trace.load_trace(path)) for path in (options.before, options.after))
    if options.json:
        print(json.dumps({"before": before, "after": after}, indent=2))
    else:
        print(comparison(before, after))
    return 0
