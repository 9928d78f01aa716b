"""rlinf-monitor: what happens in a running job's channels, as a live view or as JSON.

It is one more worker of the job: it finds the channel server in the job's registry and asks it, by
the server's usual way, for its counters. It changes nothing, takes nothing, and never has more than
one question open, so a job that is stopped or slow is not troubled by it.

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
from rlinf.channel.errors import ChannelError, ServerLost
from rlinf.channel.job import Job, read_job, running_jobs
from rlinf.channel.link import MONITOR_SERVICE, Reply, read
from rlinf.channel.snapshot import Peer, Snapshot, as_json
from rlinf.channel.statistics import ServerStatistics
from rlinf.channel.terminal import Screen, paint, svg
from rlinf.channel.view import WIDTH, draw
from rlinf.channel.web import Page, View, connection_rows
from rlinf.comm.config import CommConfig
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import CommError
from rlinf.comm.handle import Handle
from rlinf.comm.registry_server import RegistryClient
from rlinf.debug.graph import connection_graph

ANSWER_S = 15.0
"""How long the first answer may take."""
GONE_S = 10.0
"""A channel server that cannot be reached for so long is not waited for any more."""
CONNECTIONS_S = 2.0
"""A worker that takes longer to name its connections is listed as silent."""
PEERS_EVERY = 5
"""The registry is asked who is there once in so many pictures."""


class NoJob(Exception):
    """There is nothing to look at; the message says what to do."""


class JobEnded(Exception):
    """What was looked at is gone."""


class Observer:
    """Looks at one job. A context manager.

    Args:
        job: Which.
        patience_s: How long its registry may take to let the monitor in.

    Raises:
        NoJob: Its registry does not answer.
    """

    def __init__(self, job: Job, patience_s: float = ANSWER_S) -> None:
        self.job = job
        config = CommConfig(connection_timeout_s=patience_s, linger_s=0.5, idle_s=3600.0)
        try:
            registry = RegistryClient(job.address, job.token)
            self._endpoint = Endpoint(f"monitor/{os.getpid()}", registry=registry, config=config)
        except (CommError, ValueError) as error:
            raise NoJob(f"job {job} does not answer: {error}") from error
        self._asked: Handle[Reply] | None = None
        self._asked_at = self._heard_at = time.monotonic()
        self._peers: tuple[Peer, ...] = ()
        self._looks = 0

    def look(self, patience_s: float) -> Snapshot | None:
        """A new snapshot; None if the job has not answered yet (the same question stays open).

        Raises:
            JobEnded: The job, or its channel server, is gone.
        """
        if not self.job.is_alive():
            raise JobEnded("the job has ended")
        if self._asked is None:
            self._asked = self._ask()
        try:
            if self._asked is not None:
                self._asked.wait(patience_s)
                return self._read(self._asked)
        except CommError:  # it takes its time, or it is stopped
            return None
        except ServerLost as error:
            self._asked = None
            if time.monotonic() - self._heard_at > GONE_S or not self.job.is_alive():
                raise JobEnded(f"the job has ended: {error}") from error
        time.sleep(min(patience_s, 1.0))
        return None

    @property
    def silent_s(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._heard_at

    def connections(self) -> list[dict[str, object]]:
        """Who is connected to whom, over what and why, as `connection_rows`."""
        try:
            return connection_rows(connection_graph(self._endpoint, CONNECTIONS_S))
        except CommError:
            return []

    def _ask(self) -> Handle[Reply] | None:
        self._asked_at = time.monotonic()
        payload = ("statistics", "", 0)
        try:
            return self._endpoint.call(MONITOR_SERVICE, payload, to=self.job.server, timeout=None)
        except CommError:
            return None

    def _read(self, reply: Handle[Reply]) -> Snapshot:
        (server,) = read(reply, "", self.job.server, "statistics", str(self._endpoint.id))
        assert isinstance(server, ServerStatistics)
        self._heard_at = time.monotonic()
        self._asked = None
        if self._looks % PEERS_EVERY == 0:
            self._peers = self._who()
        self._looks += 1
        return Snapshot(server, self._peers, self._heard_at - self._asked_at)

    def _who(self) -> tuple[Peer, ...]:
        try:
            records = self._endpoint.registry.members()
        except CommError:
            return self._peers
        mine = self._endpoint.id
        return tuple(Peer(str(r.id), r.pid, r.host, str(r.device)) for r in records if r.id != mine)

    def close(self) -> None:
        """Leave the job."""
        self._endpoint.close()

    def __enter__(self) -> "Observer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def first(observer: Observer) -> Snapshot:
    """The first snapshot.

    Raises:
        NoJob: The job does not answer in time.
        JobEnded: It ends meanwhile.
    """
    deadline = time.monotonic() + ANSWER_S
    while (left := deadline - time.monotonic()) > 0:
        snapshot = observer.look(left)
        if snapshot is not None:
            return snapshot
    raise NoJob(
        f"{observer.job.server} of job {observer.job} did not answer within {ANSWER_S:g} s; it is "
        "starting, or stopped (a debugger?), or has another name (--server)"
    )


def two(observer: Observer, interval_s: float) -> tuple[Snapshot, Snapshot]:
    """Two snapshots, `interval_s` apart, for the rates."""
    before = first(observer)
    time.sleep(interval_s)
    return before, first(observer)


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
    asking = threading.Thread(target=view.watch_connections, args=(stop,))
    try:
        page = Page(view, arguments.port)
    except OSError as error:
        raise NoJob(f"port {arguments.port} of this machine: {error.strerror}") from error
    with page:
        print(page.url, file=out, flush=True)
        asking.start()
        try:
            view.watch(arguments.interval, stop, JobEnded)
        finally:
            stop.set()
            asking.join()
    raise JobEnded(view.ended)


def show(arguments: argparse.Namespace, out: TextIO) -> None:
    """Carry out what the command line asks for."""
    job = find_job(arguments.job)
    if arguments.server:
        job = replace(job, server=arguments.server)
    with Observer(job) as observer:
        if arguments.web:
            browse(observer, arguments, out)
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
    parser.add_argument("--web", action="store_true", help="as a page, whose address is printed")
    parser.add_argument("--port", type=int, default=0, help="of the page; a free one by default")
    parser.add_argument("--run", default="", metavar="FOLDER", help="of the job, for its curves")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="SECONDS")
    parser.add_argument("--server", default="", help="worker that hosts the channels: channel/0")
    arguments = parser.parse_args(argv)
    try:
        with _quiet():
            show(arguments, sys.stdout)
    except NoJob as error:
        print(f"rlinf-monitor: {error}", file=sys.stderr)
        return 1
    except JobEnded as error:
        print(f"rlinf-monitor: {error}", file=sys.stderr)
        return 1 if arguments.once or arguments.json or arguments.svg else 0
    except ChannelError as error:
        print(f"rlinf-monitor: the channel server refuses: {error}", file=sys.stderr)
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


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.05 and 3600 seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
