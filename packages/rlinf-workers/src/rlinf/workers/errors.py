"""What can go wrong with workers, their placement and their calls.

::

    WorkerError
    ├── ConfigError           a configuration that cannot be used; the message names the key
    ├── InfeasiblePlacement   more devices asked for than there are, with the arithmetic
    ├── MethodUnknown         (also AttributeError) the worker class has no such public method
    ├── StartError            the launcher or a worker's constructor failed
    ├── CallError             a method raised on a worker; has the remote traceback
    │   └── StageError        it was a stage: its iteration cannot be completed
    ├── Aborted               the call was given up because another one of its iteration failed
    ├── WorkerDied            a worker ended for good and the job with it
    ├── StateLost             a worker was started again without what it held: go back and repeat
    ├── CheckpointFailed      a checkpoint cannot be written
    ├── CheckpointTorn        a checkpoint cannot be read: it is damaged, or was never finished
    └── ClusterClosed         the cluster was closed while the call was under way

An error is rebuilt from `type(error)(error.message, **error.attributes)`, which is how it travels
from a worker to its caller (and pickles).
"""

from rlinf.channel import ChannelError
from rlinf.channel import errors as channel_errors
from rlinf.comm import CommError
from rlinf.comm import errors as comm_errors
from rlinf.comm.errors import TravellingError

__all__ = [
    "Aborted",
    "CallError",
    "CheckpointFailed",
    "CheckpointTorn",
    "ClusterClosed",
    "ConfigError",
    "InfeasiblePlacement",
    "MethodUnknown",
    "StageError",
    "StartError",
    "StateLost",
    "WorkerDied",
    "WorkerError",
    "explain",
    "is_consequence",
]

LOSSES = {
    name
    for module, base in ((comm_errors, CommError), (channel_errors, ChannelError))
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, base)
} | {"WeightsUnknown"}
"""What a method may raise because another process is gone, or came back with nothing to give."""


class WorkerError(TravellingError):
    """Base of all errors of this package: catch it to catch them all."""


class ConfigError(WorkerError):
    """A configuration that cannot be used: the message names the key and the nearest known one."""


class InfeasiblePlacement(WorkerError):
    """The cluster cannot hold what was asked for; the message has the arithmetic."""

    FIELDS = ("available", "group", "needed")
    group: str | None
    needed: int | None
    available: int | None


class MethodUnknown(WorkerError, AttributeError):
    """The worker class has no public method of this name."""


class StartError(WorkerError):
    """A process could not be started, or the worker's constructor raised in it."""

    FIELDS = ("traceback", "worker")
    worker: str | None
    traceback: str | None


class CallError(WorkerError):
    """A method raised on a worker. `kind` is that error's class, `traceback` its text."""

    FIELDS = ("kind", "method", "traceback", "worker")
    worker: str | None
    method: str | None
    kind: str | None
    traceback: str | None


class StageError(CallError):
    """A stage raised on a worker; what it had not committed is not in the output channel."""


class Aborted(WorkerError):
    """The call was given up because its iteration cannot be completed any more."""

    FIELDS = ("because", "worker")
    worker: str | None
    because: str | None


class WorkerDied(WorkerError):
    """A worker ended and may not (or no longer) be restarted: the job stops.

    `cause` says how it ended, as far as the launcher knows; `pid` is its process.
    """

    FIELDS = ("cause", "pid", "worker")
    worker: str | None
    cause: str | None
    pid: int | None


class StateLost(WorkerError):
    """A worker ended and was started again, but what it held can come from a checkpoint only.

    `cause` and `pid` are those of the death. Until its `restore` is called the worker fails every
    call with this error. `rlinf.workers.recovery` goes back to a checkpoint and repeats.
    """

    FIELDS = ("cause", "pid", "worker")
    worker: str | None
    cause: str | None
    pid: int | None


class CheckpointFailed(WorkerError):
    """A checkpoint cannot be written; those before it are as they were."""


class CheckpointTorn(WorkerError):
    """A checkpoint is not what was written, or was never finished."""


class ClusterClosed(WorkerError):
    """The cluster was closed before the call was done."""


def is_consequence(error: BaseException) -> bool:
    """Whether it may only tell that another process is gone, which is the cause to look for.

    Whoever needs a dead one may notice before supervision does.
    """
    if isinstance(error, CallError):
        return error.kind in LOSSES
    return isinstance(error, CommError | ChannelError | Aborted)


def explain(error: BaseException) -> str:
    """One paragraph for the screen: the first cause, without a traceback.

    An `Aborted` call is only a consequence, so its cause is told in its place.
    """
    if isinstance(error, Aborted) and error.because:
        return error.because
    text = " ".join(str(error).split())
    return text if isinstance(error, WorkerError) else f"{type(error).__name__}: {text}"
