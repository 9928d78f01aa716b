"""What a job tells of its workers to whoever looks: frozen data, made by the job's controller.

The controller serves `LIFE_SERVICE`. A request is a pair of numbers, and what is told of spans and
incidents are those with higher ones, so each of them is sent once.
"""

from dataclasses import dataclass

LIFE_SERVICE = "life"
WORK = "stage"
"""The kind of a span in which a worker worked."""


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """One worker at one moment.

    Attributes:
        id: Its name.
        running: It takes calls; else it is being started.
        restarts: How often it was started again.
        pid: Its process; 0 while it is being started.
        heard_s: Seconds since its last sign of life.
        beat_s: How often one is asked for.
        devices: What it computes on.
        rss_bytes: Resident memory of its process, pages that it shares included.
        cpu_s: Processor time that its process has used.
        calls: Not yet answered.
        doing: The method of the oldest of them.
        doing_s: Seconds since that was called.
    """

    id: str
    running: bool
    restarts: int
    pid: int
    heard_s: float
    beat_s: float
    devices: tuple[str, ...] = ()
    rss_bytes: int = 0
    cpu_s: float = 0.0
    calls: int = 0
    doing: str = ""
    doing_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """What a worker did for some time.

    Attributes:
        number: Counts all spans of the job.
        worker: Who.
        kind: `WORK`, or what it waited for or did around that.
        name: Of the stage, with its group: "rollout.generate".
        iteration: To which it belongs.
        start, end: Seconds since the Unix epoch.
    """

    number: int
    worker: str
    kind: str
    name: str
    iteration: int
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happened.

    Attributes:
        number: Counts all incidents of the job.
        at: Seconds since the Unix epoch.
        kind: started, died, stopped, plan, recovery ...
        who: The worker or channel it is about; may be empty.
        text: What, for a person.
    """

    number: int
    at: float
    kind: str
    who: str
    text: str


@dataclass(frozen=True, slots=True)
class Life:
    """The workers of a job, and what happened lately.

    Attributes:
        now: Seconds since the Unix epoch, where the controller is.
        workers: In order of joining.
        spans: By number.
        incidents: By number.
        run: The folder of the run, absolute; empty: there is none.
    """

    now: float
    workers: tuple[WorkerLife, ...] = ()
    spans: tuple[Span, ...] = ()
    incidents: tuple[Incident, ...] = ()
    run: str = ""
