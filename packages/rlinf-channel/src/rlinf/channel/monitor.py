"""rlinf-monitor: what happens in a running job, as a live view, as JSON, or as a page in a browser.

It finds the job in its registry and looks at it as `rlinf.channel.observer` does.

Exit codes: 0 it was shown (also: the job ended meanwhile, or Ctrl-C), 1 there is no such job or it
does not answer, 2 wrong usage.
"""

import argparse
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from rlinf.channel.config import registry_token, runtime_folder
from rlinf.channel.errors import ChannelError
from rlinf.channel.job import Job, read_job, running_jobs
from rlinf.channel.observer import JobEnded, NoJob, Observer, first, two
from rlinf.channel.snapshot import as_json
from rlinf.channel.terminal import Screen, paint, svg
from rlinf.channel.view import WIDTH, draw
from rlinf.channel.web import Page, View
from rlinf.comm.errors import CommError
from rlinf.debug.drawing import FORMS, visualize_connection_graph

TROUBLE = "see docs/troubleshooting.md#rlinf-monitor-finds-nothing"


def find_job(where: str | None) -> Job:
    """The job that the command line means.

    Args:
        where: None: the only one there is; a process id; a job file; or a registry's address,
            with its token in `RLINF_TOKEN`.

    Raises:
        NoJob: There is none, or more than one.
    """
    if where is not None and "://" in where:
        if not registry_token():
            raise NoJob(f"put the token of the registry at {where} into RLINF_TOKEN (hexadecimal)")
        return Job(where, registry_token())
    if where is not None and not where.isdigit():
        try:
            return read_job(Path(where))
        except (OSError, ValueError) as error:
            raise NoJob(f"{where} is no job file: {error}") from error
    jobs = running_jobs()
    if where is not None:
        jobs = tuple(job for job in jobs if job.pid == int(where))
    if len(jobs) == 1:
        return jobs[0]
    if jobs:
        listed = "\n".join(f"  {job}" for job in jobs)
        raise NoJob(f"several jobs run here; name one of them by its process id:\n{listed}")
    which = "no job of this user runs" if where is None else f"process {where} runs no job"
    raise NoJob(
        f"{which} here that announces itself in {runtime_folder()}, as every cluster "
        "does, or by rlinf.channel.announce. Name a job of another machine by its job file "
        "or by its registry's address"
    )


def live(observer: Observer, interval_s: float, out: TextIO) -> None:
    """Show one picture after another until the job ends.

    Raises:
        JobEnded: It has.
    """
    title, before = f"job {observer.job}", first(observer)
    with Screen(out) as screen:
        screen.show(draw(title, before))
        last = before
        while True:
            started = time.monotonic()
            snapshot = observer.look(interval_s)
            if snapshot is None:
                screen.show(draw(f"{title}  NO ANSWER for {observer.silent_s:.0f} s", last, before))
                continue
            before, last = last, snapshot
            screen.show(draw(title, last, before))
            time.sleep(max(0.0, started + interval_s - time.monotonic()))


def browse(observer: Observer, arguments: argparse.Namespace, out: TextIO) -> None:
    """Serve the page until the job ends.

    Raises:
        JobEnded: It has.
        NoJob: The port is taken.
    """
    run = Path(arguments.run) if arguments.run else None
    view, stop = View(observer, str(observer.job), run), threading.Event()
    asking = threading.Thread(target=view.watch_connections, args=(stop,), daemon=True)
    try:
        page = Page(view, arguments.port)
    except OSError as error:
        raise NoJob(f"port {arguments.port} of this machine: {error.strerror}") from error
    with page:
        try:
            print(page.url, file=out, flush=True)
            asking.start()
            view.watch(arguments.interval, stop, JobEnded)
        finally:
            stop.set()
            if asking.is_alive():  # not where Ctrl-C came while it was being started
                asking.join()
    raise JobEnded(view.ended)


def connect(observer: Observer, file: str, out: TextIO) -> None:
    """Draw who is connected to whom: as text, or into a file of the form that its name ends in."""
    form = Path(file).suffix.removeprefix(".") if file else "text"
    drawn = visualize_connection_graph(observer.connections(), form, file or None)
    if not file:
        print(drawn, file=out)


def show(arguments: argparse.Namespace, out: TextIO) -> None:
    """Carry out what the command line asks for."""
    job = find_job(arguments.job)
    if arguments.server:
        job = replace(job, server=arguments.server)
    with Observer(job) as observer:
        if arguments.web:
            browse(observer, arguments, out)
        elif arguments.graph is not None:
            connect(observer, arguments.graph, out)
        elif arguments.json:
            before, after = two(observer, arguments.interval)
            json.dump({"job": str(job), **as_json(after, before)}, out, indent=1)
            out.write("\n")
        elif arguments.once or arguments.svg:
            before, after = two(observer, arguments.interval)
            lines = draw(f"job {job}", after, before)
            if arguments.svg:
                Path(arguments.svg).write_text(svg(lines, WIDTH), encoding="utf-8")
            if arguments.once:
                out.writelines(f"{line}\n" for line in paint(lines, WIDTH, colours=out.isatty()))
        else:
            live(observer, arguments.interval, out)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="rlinf-monitor", description="Show the channels, locks and workers of a running job."
    )
    parser.add_argument(
        "job",
        nargs="?",
        help="its process id, its job file, or its registry's address with the token in "
        "RLINF_TOKEN; may be left out where only one runs here",
    )
    parser.add_argument("--once", action="store_true", help="one picture")
    parser.add_argument("--json", action="store_true", help="one snapshot as JSON")
    parser.add_argument("--svg", default="", metavar="FILE", help="one picture, into a file")
    parser.add_argument(
        "--graph",
        type=_drawing,
        nargs="?",
        const="",
        metavar="FILE",
        help="who is connected to whom, over what and why; as text, or into FILE.svg, .png or .dot",
    )
    parser.add_argument("--web", action="store_true", help="as a page, whose address is printed")
    parser.add_argument("--port", type=int, default=0, help="of the page; a free one by default")
    parser.add_argument(
        "--run", default="", metavar="FOLDER", help="of the run, for its curves; most jobs say it"
    )
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="SECONDS")
    parser.add_argument("--server", default="", help="worker that hosts the channels: channel/0")
    arguments = parser.parse_args(argv)
    try:
        with _quiet():
            show(arguments, sys.stdout)
    except NoJob as error:
        print(f"rlinf-monitor: {error} ({TROUBLE})", file=sys.stderr)
        return 1
    except JobEnded as error:
        print(f"rlinf-monitor: {error}", file=sys.stderr)
        return 1 if arguments.once or arguments.json or arguments.svg else 0
    except ChannelError as error:
        print(f"rlinf-monitor: the channel server refuses: {error}", file=sys.stderr)
        return 1
    except CommError as error:
        print(f"rlinf-monitor: the job's registry does not answer: {error}", file=sys.stderr)
        return 1
    except ImportError as error:  # a PNG without matplotlib
        print(f"rlinf-monitor: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing left to flush to
    return 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Log nothing meanwhile: the picture says it."""
    logger = logging.getLogger("rlinf")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _drawing(text: str) -> str:
    form = Path(text).suffix.removeprefix(".")
    if text and form not in FORMS:
        raise argparse.ArgumentTypeError(f"{text} does not end in .{', .'.join(FORMS)}")
    return text


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.05 and 3600 seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
