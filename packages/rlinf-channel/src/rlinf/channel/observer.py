"""Observer: one more worker of a job, which asks and changes nothing.

It never has more than one question open at anybody, so a job that is stopped or slow is not
troubled by it.
"""

import logging
import os
import time
from collections import deque
from dataclasses import replace

from rlinf.channel.errors import ServerLost
from rlinf.channel.findings import Log, findings
from rlinf.channel.job import Job, is_gone
from rlinf.channel.life import LIFE_SERVICE, Incident, Life, Span
from rlinf.channel.link import MONITOR_SERVICE, Reply, read
from rlinf.channel.snapshot import Peer, Snapshot
from rlinf.channel.statistics import ServerStatistics
from rlinf.comm.config import CommConfig
from rlinf.comm.endpoint import Endpoint
from rlinf.comm.errors import CommError, Timeout
from rlinf.comm.handle import Handle
from rlinf.comm.host import host_id
from rlinf.comm.registry_server import RegistryClient
from rlinf.debug.graph import ConnectionGraph, connection_graph

log = logging.getLogger(__name__)

ANSWER_S = 15.0
"""How long the first answer may take."""
GONE_S = 10.0
"""A channel server that cannot be reached for so long is not waited for any more."""
CONNECTIONS_S = 2.0
"""A worker that takes longer to name its connections is listed as silent."""
LIFE_S = 0.25
"""So long a picture waits for the controller; a later answer is in the next one."""
PEERS_EVERY = 2
"""The registry is asked who is there once in so many pictures, and once somebody is gone."""
MOST_SPANS = 2000
"""Those of so many are kept; the controller keeps as many."""


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
        self._life: Life | None = None
        self._life_asked: Handle[Life] | None = None
        self._spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self._told = 0
        self._log = Log()

    def look(self, patience_s: float) -> Snapshot | None:
        """A new snapshot; None if the job has not answered yet (the same question stays open).

        Raises:
            JobEnded: The job, or its channel server, is gone.
        """
        if not self.job.is_alive():
            raise JobEnded("the job has ended")
        if self._asked is None:
            self._asked = self._ask()
        if self._life_asked is None:
            self._life_asked = self._ask_life()
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

    def connections(self) -> ConnectionGraph:
        """Who is connected to whom, over what and why, without the observer itself.

        Raises:
            CommError: The registry does not answer.
        """
        graph = connection_graph(self._endpoint, CONNECTIONS_S)
        others = tuple(worker for worker in graph.workers if worker.id != self._endpoint.id)
        return replace(graph, workers=others)

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
        self._peers = tuple(replace(peer, gone=self._is_gone(peer)) for peer in self._peers)
        if self._looks % PEERS_EVERY == 0 or any(peer.gone for peer in self._peers):
            self._peers = self._who()
        self._looks += 1
        incidents = self._read_life()
        seen = Snapshot(server, self._peers, self._heard_at - self._asked_at, self._life)
        entries = self._log.take(incidents, findings(seen), time.time())
        return replace(seen, log=entries)

    def _who(self) -> tuple[Peer, ...]:
        try:
            records = self._endpoint.registry.members()
        except CommError:
            return self._peers
        mine = self._endpoint.id
        peers = [Peer(str(r.id), r.pid, r.host, str(r.device)) for r in records if r.id != mine]
        return tuple(replace(peer, gone=self._is_gone(peer)) for peer in peers)

    def _is_gone(self, peer: Peer) -> bool:
        return peer.host == host_id() and is_gone(peer.pid)

    def _ask_life(self) -> Handle[Life] | None:
        """Ask the controller, where there is one, for what is new."""
        if all(peer.id != self.job.controller for peer in self._peers):
            return None
        after = (self._spans[-1].number if self._spans else 0, self._told)
        try:
            return self._endpoint.call(LIFE_SERVICE, after, to=self.job.controller, timeout=None)
        except CommError:
            return None

    def _read_life(self) -> tuple[Incident, ...]:
        """Take in what the controller has answered; the incidents that are new."""
        if self._life_asked is None:
            return ()
        try:
            self._life_asked.wait(LIFE_S)
        except Timeout:
            return ()
        answer, self._life_asked = self._life_asked, None
        try:
            life = answer.result(0)
        except CommError as error:  # it ends, or is no controller that tells of its workers
            log.debug("%s does not tell of its workers: %s", self.job.controller, error)
            return ()
        self._spans.extend(life.spans)
        self._told = max([self._told, *(one.number for one in life.incidents)])
        self._life = replace(life, spans=tuple(self._spans), incidents=())
        return life.incidents

    def close(self) -> None:
        """Leave the job."""
        self._endpoint.close()

    def __enter__(self) -> "Observer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
