"""CommConfig: everything about an endpoint that a deployment may want to change."""

import difflib
import logging
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from rlinf.comm.errors import ConfigError

PREFIX = "RLINF_COMM_"
ALIASES = {"CONNECTION_TIMEOUT": "connection_timeout_s", "LOG_LEVEL": "log_level"}


@dataclass(frozen=True, slots=True)
class CommConfig:
    """Settings of one endpoint. Every field has a default that suits one host.

    Attributes:
        connection_timeout_s: Deadline of every wait that names none of its own, of a registry
            lookup and of making a connection. Also `CONNECTION_TIMEOUT` in the environment.
        heartbeat_s: How often a worker renews its lease in the registry; best a third of the lease.
        pool_bytes: Upper bound of the shared memory this endpoint writes messages into; 0: a
            fifth of the free memory, at most 4 GiB.
        inline_bytes: Buffers up to this size travel beside the header, larger ones in the pool.
        window_bytes: How much a peer may send that nobody here has received yet.
        max_message_bytes: A message that claims to be larger is refused before it is allocated.
        chunk_bytes: A large message goes over a socket in pieces of this size, so that small
            ones get in between.
        idle_s: A connection nobody used for this long is closed; the next send makes it again.
        pool_idle_s: Unused pool memory is given back to the system after this long.
        linger_s: How long `close` waits for what is already queued to leave.
        watch_s: How long a receiver waits for a silent, unconnected peer before it connects by
            itself, so as to learn of that peer's death.
        allow_pickle: Whether objects the codec does not know may be (un)pickled.
        serialization: How objects are encoded; structured is the only way: structure in a small
            header, arrays in buffers, and pickled is what neither holds (see `allow_pickle`).
        backend_priority: Names of transports to prefer, in order, over the built-in choice.
        host: Address to listen on and to tell to others. Empty: one that reaches the registry.
        port: TCP port to listen on; 0: one the system chooses, which is never taken.
        tcp_streams: Over how many TCP connections a buffer of four chunks or more goes to another
            host, 1 to 64; they use ports the system chooses. 1: over the one there is.
        tls_cert: Path of this worker's certificate (PEM, with the chain). With `tls_key` and
            `tls_ca`, TCP is encrypted and both sides must have a certificate that `tls_ca` signed.
        tls_key: Path of its private key (PEM, not encrypted).
        tls_ca: Path of the certificates that may sign those of workers: of a CA for this job
            alone, since whoever has a certificate of it is let in, whatever its name.
        log_level: Level of the logger "rlinf" ("DEBUG", "INFO", ...), which then also writes to
            stderr if nobody has set up logging. Also `LOG_LEVEL` in the environment.
        debug_in_place: Check that an array from `Endpoint.empty` was not changed while it was
            still on loan to a receiver; says so in the log (reads the array twice).
    """

    connection_timeout_s: float = 30.0
    heartbeat_s: float = 5.0
    pool_bytes: int = 0
    inline_bytes: int = 4096
    window_bytes: int = 1 << 30
    max_message_bytes: int = 64 << 30
    chunk_bytes: int = 1 << 20
    idle_s: float = 300.0
    pool_idle_s: float = 10.0
    linger_s: float = 5.0
    watch_s: float = 0.25
    allow_pickle: bool = True
    serialization: str = "structured"
    backend_priority: tuple[str, ...] = ()
    host: str = ""
    port: int = 0
    tcp_streams: int = 1
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    log_level: str = ""
    debug_in_place: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value < 0:
                raise ConfigError(f"CommConfig.{field.name} is {value}; it must not be negative")
        if not 1 <= self.tcp_streams <= 64:
            raise ConfigError(f"CommConfig.tcp_streams is {self.tcp_streams}; it is 1 to 64")
        if self.serialization != "structured":
            raise ConfigError(
                f"CommConfig.serialization is {self.serialization!r}; there is structured, with "
                "allow_pickle for what it does not know"
            )
        tls = (self.tls_cert, self.tls_key, self.tls_ca)
        if any(tls) and not all(tls):
            raise ConfigError("CommConfig: tls_cert, tls_key and tls_ca belong together: set all")
        if self.log_level and self.log_level.upper() not in logging.getLevelNamesMapping():
            known = ", ".join(logging.getLevelNamesMapping())
            raise ConfigError(f"CommConfig.log_level is {self.log_level!r}; known are {known}")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "CommConfig":
        """Read `RLINF_COMM_<FIELD>` and `CONNECTION_TIMEOUT`; an unknown field is an error."""
        environment = os.environ if environment is None else environment
        values: dict[str, str] = {}
        for key, text in environment.items():
            if key in ALIASES:
                values.setdefault(ALIASES[key], text)
            elif key.startswith(PREFIX):
                values[key.removeprefix(PREFIX).lower()] = text
        return cls().with_values(values)

    def with_values(self, values: Mapping[str, object]) -> "CommConfig":
        """A copy with some fields replaced; strings are converted to the field's type.

        Raises:
            ConfigError: A key is unknown (the nearest known one is named) or does not convert.
        """
        kinds = typing.get_type_hints(type(self))
        converted: dict[str, typing.Any] = {}
        for key, value in values.items():
            if key not in kinds:
                near = difflib.get_close_matches(key, kinds, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {sorted(kinds)}"
                raise ConfigError(f"CommConfig has no field {key!r}{hint}")
            converted[key] = _convert(key, value, kinds[key])
        return replace(self, **converted)


def _convert(key: str, value: object, kind: object) -> object:
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    try:
        if isinstance(kind, types.GenericAlias):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if kind is bool:
            return {"1": True, "true": True, "0": False, "false": False}[value.lower()]
        return kind(value) if kind in (int, float) else value
    except (ValueError, KeyError):
        raise ConfigError(f"CommConfig.{key} is {value!r}, which is no {kind}") from None
