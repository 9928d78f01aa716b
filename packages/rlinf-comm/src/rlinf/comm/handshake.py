"""The handshake: both sides prove that they hold the token before anything else is looked at.

    dialler  -> HELLO      version, who I am, my epoch, whom I want, which epoch (0: any), nonce
    acceptor -> CHALLENGE  version, who I am, my epoch, nonce, HMAC(token, "acceptor", both)
    dialler  -> PROVE      HMAC(token, "dialler", both)
    acceptor -> WELCOME    or REFUSE: code, epoch, text (at any point)

Pure: bytes in, bytes out. Frames before WELCOME are bounded by `frame.SHAKE_BYTES`.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum

from rlinf.comm.address import WorkerId
from rlinf.comm.errors import AuthenticationError, ProtocolError

VERSION = 1
MAGIC = b"RLnf"
NONCE_BYTES = 32
_HELLO = struct.Struct("<4sHQQ32sHH")
_REFUSE = struct.Struct("<BQ")


class Refusal(IntEnum):
    """Why an acceptor says no."""

    VERSION = 1
    TOKEN = 2
    WRONG_WORKER = 3  # somebody else listens here now
    WRONG_EPOCH = 4  # meant for an earlier incarnation of me
    STALE = 5  # the dialler has itself been replaced
    DUPLICATE = 6  # there is a connection, or one of mine is under way and goes first
    CLOSING = 7


@dataclass(frozen=True, slots=True)
class Party:
    """One side: its name and its incarnation."""

    id: WorkerId
    epoch: int


class Dialler:
    """The side that dials.

    Args:
        me: This side.
        target: Whom it wants; epoch 0: whichever incarnation answers.
        token: The secret of the registry.
    """

    def __init__(self, me: Party, target: Party, token: bytes) -> None:
        self._target = target
        self._token = token
        name, wanted = str(me.id).encode(), str(target.id).encode()
        nonce = secrets.token_bytes(NONCE_BYTES)
        sizes = (len(name), len(wanted))
        head = _HELLO.pack(MAGIC, VERSION, me.epoch, target.epoch, nonce, *sizes)
        self.hello = head + name + wanted

    def prove(self, challenge: bytes) -> tuple[bytes, int]:
        """Check the acceptor's proof; returns ours and the acceptor's epoch.

        Raises:
            AuthenticationError: It does not hold the token.
            ProtocolError: It speaks another version, or is not who was asked for.
        """
        core, mac = _split_challenge(challenge)
        version, epoch, name = _read_core(core)
        if version != VERSION:
            raise ProtocolError(
                f"{self._target.id} speaks version {version} of the protocol, this side {VERSION}: "
                "install the same rlinf-comm on both"
            )
        if not hmac.compare_digest(mac, _mac(self._token, b"acceptor", self.hello, core)):
            raise AuthenticationError(
                f"whoever answers for {self._target.id} does not hold the registry's token",
                peer=self._target.id,
            )
        if name != str(self._target.id):
            raise ProtocolError(f"dialled {self._target.id}, but {name} answered")
        return _mac(self._token, b"dialler", self.hello, core), epoch


class Acceptor:
    """The side that was dialled."""

    def __init__(self, me: Party, token: bytes) -> None:
        self._me = me
        self._token = token
        self._hello = b""
        self._core = b""
        self.peer: Party | None = None

    def challenge(self, hello: bytes) -> bytes | Refusal:
        """Answer a HELLO; `peer` is then who claims to be there (not yet proven)."""
        try:
            magic, version, epoch, wanted_epoch, _, a, b = _HELLO.unpack_from(hello)
            rest = hello[_HELLO.size :]
            if magic != MAGIC or len(rest) != a + b:
                raise ProtocolError("not a greeting of this protocol")
            if version != VERSION:
                return Refusal.VERSION
            self.peer = Party(WorkerId.parse(rest[:a].decode()), epoch)
            wanted = rest[a:].decode()
        except (struct.error, ValueError) as error:
            raise ProtocolError(f"not a greeting of this protocol: {error}") from None
        if wanted != str(self._me.id):
            return Refusal.WRONG_WORKER
        if wanted_epoch not in (0, self._me.epoch):
            return Refusal.WRONG_EPOCH
        name = str(self._me.id).encode()
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._hello = hello
        self._core = struct.pack("<4sHQ32sH", MAGIC, VERSION, self._me.epoch, nonce, len(name))
        self._core += name
        return self._core + _mac(self._token, b"acceptor", hello, self._core)

    def proven(self, proof: bytes) -> bool:
        """Whether the dialler holds the token."""
        expected = _mac(self._token, b"dialler", self._hello, self._core)
        return bool(self._core) and hmac.compare_digest(proof, expected)


def refusal(code: Refusal, epoch: int, text: str) -> bytes:
    """Encode a REFUSE."""
    return _REFUSE.pack(code, epoch) + text.encode()[:1024]


def read_refusal(data: bytes) -> tuple[Refusal, int, str]:
    """Decode a REFUSE: code, the acceptor's (or newest known) epoch, text."""
    try:
        code, epoch = _REFUSE.unpack_from(data)
        return Refusal(code), epoch, data[_REFUSE.size :].decode(errors="replace")
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"not a refusal of this protocol: {error}") from None


def _split_challenge(challenge: bytes) -> tuple[bytes, bytes]:
    return challenge[:-32], challenge[-32:]


def _read_core(core: bytes) -> tuple[int, int, str]:
    try:
        magic, version, epoch, _, size = struct.unpack_from("<4sHQ32sH", core)
        name = core[struct.calcsize("<4sHQ32sH") :]
        if magic != MAGIC or len(name) != size:
            raise ProtocolError("not a challenge of this protocol")
        return version, epoch, name.decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a challenge of this protocol: {error}") from None


def _mac(token: bytes, role: bytes, hello: bytes, core: bytes) -> bytes:
    return hmac.digest(token, role + len(hello).to_bytes(4, "little") + hello + core, "sha256")
