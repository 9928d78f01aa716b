"""What ``rlinf-sched`` understands, with an example of every command."""

import argparse

from rlinf.sched.recorded import RULES

JITTER = 0.03
"""Of a simulation that is not told otherwise."""

_EXAMPLES = {
    "plan": "rlinf-sched plan workflow.yaml --gpus 128 -o plan.yaml",
    "simulate": """rlinf-sched simulate workflow.yaml --reality reality.yaml --draw plan.html

A file of --reality says what a profile does not, every key of it optional but lengths:

  jitter: 0.03                   # relative standard deviation of each micro-batch's time
  engines:                       # components that generate by continuous batching
    rollout:
      lengths: {median: 2000, sigma: 0.8, most: 16384}   # log-normal, in tokens; or a list
      group: 8                   # requests of one item
      devices: 2                 # of one engine
      slots: 128                 # requests decoded together
      step_s: 0.0068             # seconds of a decode step
      request_step_s: 0.00013    # and for every request in it
      tool_s: 1.5                # mean wait of a request for tools

An engine's times replace those of the workflow: the error printed is then that of the profile.""",
    "explain": "rlinf-sched explain workflow.yaml --plan plan.yaml",
    "compare": "rlinf-sched compare workflow.yaml plan.yaml other.yaml --json",
    "replay": "rlinf-sched replay workflow.yaml trace --rule gain --switch 5",
}


def _number(text: str) -> float:
    """A finite number of 0 or more, for the argument parser."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, is {text}")
    return value


def _noise(text: str) -> float:
    value = _number(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"must be at most 1, is {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, is {text}")
    return value


def _plan_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("-o", "--output", metavar="FILE", help="save the plan here")
    command.add_argument(
        "--robust",
        type=_noise,
        metavar="NOISE",
        help="the plan that is best on average where every time may be off by so much, e.g. 0.1",
    )


def _explain_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--plan", metavar="FILE", help="this plan instead of the best")


def _simulate_arguments(command: argparse.ArgumentParser) -> None:
    _explain_arguments(command)
    command.add_argument("--reality", metavar="FILE", help="lengths, tools, batching; see below")
    command.add_argument(
        "--jitter",
        type=_number,
        metavar="SHARE",
        help="relative standard deviation of times; default 0.03, or as --reality says",
    )
    command.add_argument("--iterations", type=_count, default=8, metavar="N", help="default 8")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")
    command.add_argument(
        "--draw",
        metavar="FILE",
        help="the last iteration: .png (needs matplotlib), .html, or .json (Chrome trace)",
    )


def _compare_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("plans", nargs="*", metavar="plan", help="saved plans to compare with")


def _replay_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("trace", help="a trace file, or a folder of them")
    command.add_argument(
        "--rule",
        choices=RULES,
        default=RULES[0],
        help=f"when to plan again; default {RULES[0]}",
    )
    command.add_argument(
        "--switch",
        type=_number,
        default=5.0,
        metavar="SECONDS",
        help="that a change of plan costs; default 5",
    )


_ARGUMENTS = {
    "plan": _plan_arguments,
    "simulate": _simulate_arguments,
    "explain": _explain_arguments,
    "compare": _compare_arguments,
    "replay": _replay_arguments,
}


def sched_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="rlinf-sched",
        description="Plan staged pipelines.",
        epilog="rlinf-sched COMMAND --help shows an example of each.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    texts = {
        "plan": "find the quickest plan",
        "simulate": "execute a plan with long tails, tools and jitter, against its prediction",
        "explain": "say why this plan",
        "compare": "the best plan of each kind, or the plans given",
        "replay": "what re-planning would have done on a recorded run",
    }
    for name, text in texts.items():
        command = commands.add_parser(
            name,
            help=text,
            description=text,
            epilog=f"example:\n  {_EXAMPLES[name]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("workflow", help="YAML or JSON document")
        command.add_argument("--gpus", type=int, metavar="N", help="plan for N devices")
        command.add_argument("--json", action="store_true", help="print JSON")
        _ARGUMENTS[name](command)
    return parser
