"""Who and where: WorkerId names a worker, Address says how to reach one. No I/O."""

import re
from dataclasses import dataclass

_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_RANK = re.compile(r"0|[1-9][0-9]*")

_HOST_SCHEMES = frozenset({"tcp", "tls"})


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """The name of a worker for the whole life of a job: `group/rank`, as in "rollout/3".

    An incarnation (a restart under the same name) is told apart by the epoch in its record, not
    by its id. Ordered by group, then rank.

    Args:
        group: Letters, digits, `_`, `.` and `-`; does not begin with `.` or `-`.
        rank: 0 or more.

    Raises:
        ValueError: The group or rank is not of that form.
    """

    group: str
    rank: int

    def __post_init__(self) -> None:
        if not _GROUP.fullmatch(self.group):
            raise ValueError(
                f"worker group {self.group!r} must be letters, digits, '_', '.' or '-', "
                "and begin with a letter, a digit or '_'"
            )
        if type(self.rank) is not int or self.rank < 0:
            raise ValueError(f"worker rank {self.rank!r} of {self.group!r} must be an int >= 0")

    def __str__(self) -> str:
        return f"{self.group}/{self.rank}"

    @classmethod
    def parse(cls, text: "str | WorkerId") -> "WorkerId":
        """Read "group/rank"; a WorkerId is returned as it is.

        Raises:
            ValueError: The text is not of that form.
        """
        if isinstance(text, WorkerId):
            return text
        group, slash, rank = text.rpartition("/")
        if not slash or not _RANK.fullmatch(rank):
            raise ValueError(f"worker id {text!r} must be 'group/rank', as in 'rollout/3'")
        return cls(group, int(rank))


@dataclass(frozen=True, slots=True, order=True)
class Address:
    """Where a transport listens, as a URI that round-trips through `str`.

    `tcp://10.0.0.1:4000`, `tcp://[::1]:80` (IPv6 in brackets), `unix:///run/x.sock`,
    `unix://@name` (abstract socket), `inproc://name`.

    Args:
        scheme: The transport's name, lower case.
        host: Host name or IP address without brackets; empty for schemes without a host.
        port: 1 to 65535, or 0 for schemes without a port.
        path: What follows `scheme://` where there is no host.

    Raises:
        ValueError: The parts do not make an address.
    """

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    def __post_init__(self) -> None:
        if not _SCHEME.fullmatch(self.scheme):
            raise ValueError(f"address scheme {self.scheme!r} must be lower-case letters")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port} of {self.host!r} is not between 0 and 65535")
        if bool(self.host) == bool(self.path):
            raise ValueError(f"a {self.scheme} address has a host and port, or a path, not both")
        if self.host and (not self.port or re.search(r"[\s/\[\]@]", self.host)):
            raise ValueError(f"{self.scheme} host {self.host!r} port {self.port} make no address")
        if not self.host and (
            self.port or self.scheme in _HOST_SCHEMES or _ends_in_port(self.path)
        ):
            raise ValueError(f"a {self.scheme} address needs a host and a port, or only a path")

    def __str__(self) -> str:
        if self.path:
            return f"{self.scheme}://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @classmethod
    def parse(cls, text: "str | Address") -> "Address":
        """Read a URI; an Address is returned as it is.

        Raises:
            ValueError: The text is no address; the message has an example.
        """
        if isinstance(text, Address):
            return text
        scheme, separator, rest = text.partition("://")
        if not separator or not rest:
            raise ValueError(f"address {text!r} must be a URI, as in 'tcp://10.0.0.1:4000'")
        if scheme not in _HOST_SCHEMES and not _ends_in_port(rest):
            return cls(scheme, path=rest)
        host, colon, port = rest.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if not colon or not port.isascii() or not port.isdigit() or (":" in host) != bracketed:
            raise ValueError(
                f"address {text!r} must end in 'host:port', an IPv6 host in brackets, "
                "as in 'tcp://10.0.0.1:4000' or 'tcp://[::1]:4000'"
            )
        return cls(scheme, host=host[1:-1] if bracketed else host, port=int(port))


def _ends_in_port(rest: str) -> bool:
    return rest[:1] not in ("", "/", "@") and re.search(r":[0-9]+$", rest) is not None
