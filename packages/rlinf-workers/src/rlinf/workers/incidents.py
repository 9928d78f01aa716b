"""What supervision is told and what it answers: events and commands, frozen data."""

from dataclasses import dataclass, field

from rlinf.workers.errors import StartError, WorkerError

__all__ = [
    "Answered",
    "Broke",
    "Command",
    "Died",
    "Event",
    "Fail",
    "Forget",
    "Heard",
    "Join",
    "Kill",
    "Launch",
    "Ping",
    "Release",
    "Send",
    "Started",
    "Stop",
    "Submit",
    "Tick",
]

# -- events: what has happened --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Join:
    """A worker belongs to the job from now on and may be restarted so many times in a row.

    `unit`: the workers that hold a state together and lose it together; empty: it holds none.
    """

    worker: str
    restarts: int
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Submit:
    """Somebody calls the worker; `call` is a number used once.

    `restores`: it brings state back. `stateless`: it is carried out whether state was lost or not.
    `leaves`: with it the worker ends, and belongs to the job no more.
    """

    worker: str
    call: int
    restores: bool = False
    stateless: bool = False
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody waits for the call any more: do not send it again."""

    worker: str
    call: int


@dataclass(frozen=True, slots=True)
class Started:
    """This incarnation is constructed and takes calls; `epoch`: of its endpoint."""

    worker: str
    incarnation: int
    pid: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Answered:
    """This incarnation has answered the call, with a value or an error."""

    worker: str
    incarnation: int
    call: int


@dataclass(frozen=True, slots=True)
class Heard:
    """This incarnation has answered a ping."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Died:
    """This incarnation is gone. `fault`: its constructor raised, so trying again is in vain."""

    worker: str
    incarnation: int
    cause: str
    fault: StartError | None = None


@dataclass(frozen=True, slots=True)
class Broke:
    """The connection to the endpoint with this epoch is gone, `cause` says how: so is its process.

    That may be told late, when the next incarnation has been launched already.
    """

    worker: str
    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Join | Submit | Forget | Started | Answered | Heard | Died | Broke | Tick

# -- commands: what is to be done -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Launch:
    """Start a process for this incarnation; `cause`: how the one before died."""

    worker: str
    incarnation: int
    cause: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Send:
    """Send the call to this incarnation; it must answer with `Answered`."""

    worker: str
    incarnation: int
    call: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask this incarnation for a sign of life."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Kill:
    """See to it that this incarnation is gone, however it got there."""

    worker: str
    incarnation: int
    cause: str


@dataclass(frozen=True, slots=True)
class Release:
    """The call is done: give its answer to whoever waits."""

    call: int


@dataclass(frozen=True, slots=True)
class Fail:
    """The call will never be answered: give this error to whoever waits."""

    call: int
    error: WorkerError


@dataclass(frozen=True, slots=True)
class Stop:
    """The job is over, because of this error; all calls have failed with it."""

    error: WorkerError


Command = Launch | Send | Ping | Kill | Release | Fail | Stop
