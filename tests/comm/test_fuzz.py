"""Every decoder against bytes that mean nothing, or nearly something: an error, and life goes on.

The codec itself is in test_codec_malformed, frames are in test_frame, bundles in test_many.
"""

import contextlib
import socket
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlinf.comm import (
    Address,
    AuthenticationError,
    CodecError,
    CommConfig,
    CommError,
    Endpoint,
    MemoryRegistry,
    PeerLost,
    RegistryServer,
    WorkerId,
)
from rlinf.comm.bundle import tie
from rlinf.comm.codec import split
from rlinf.comm.encoding.shorthand import Shortener
from rlinf.comm.errors import ProtocolError
from rlinf.comm.frame import (
    CHUNK,
    CHUNKED,
    CREDIT,
    DROP,
    END,
    HELLO,
    INLINE,
    MANY,
    MESSAGE,
    PLACED,
    PREFIX,
    PROVE,
    RAW,
    RELEASE,
    REPLY,
    REQUEST,
    SEGMENT,
    SHORT,
)
from rlinf.comm.handshake import Acceptor, Dialler, Party, read_refusal
from rlinf.comm.registry_server import NAME, SERVICE
from rlinf.comm.request import rebuild
from rlinf.comm.testing import eventually, worker

HERE, THERE = Party(WorkerId("here", 0), 5), Party(WorkerId("there", 0), 7)
TOKEN = b"t" * 32
quickly = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=9) | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)


def mutated(data, changes, cut):
    """Some bytes changed, and the end cut off."""
    changed = bytearray(data)
    for position, value in changes:
        changed[position % len(changed)] = value
    return bytes(changed[: cut % (len(changed) + 1) or len(changed)])


changes = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=4)


@given(st.binary(max_size=120) | st.none(), changes, st.integers(0, 200))
def test_no_greeting_hurts_an_acceptor(data, changes, cut):
    acceptor = Acceptor(HERE, TOKEN)
    hello = Dialler(THERE, HERE, TOKEN).hello
    with contextlib.suppress(ProtocolError):
        acceptor.challenge(mutated(hello, changes, cut) if data is None else data)
        assert not acceptor.proven(b"") and not acceptor.proven(data or b"x" * 32)


@given(st.binary(max_size=120) | st.none(), changes, st.integers(0, 200))
def test_no_challenge_hurts_a_dialler(data, changes, cut):
    dialler, acceptor = Dialler(THERE, HERE, TOKEN), Acceptor(HERE, TOKEN)
    challenge = acceptor.challenge(dialler.hello)
    given_ = mutated(challenge, changes, cut) if data is None else data
    if given_ != challenge:
        with pytest.raises((ProtocolError, AuthenticationError)):
            dialler.prove(given_)


@given(st.binary(max_size=60))
def test_no_refusal_hurts_its_reader(data):
    with contextlib.suppress(ProtocolError):
        read_refusal(data)


@given(st.text(max_size=40) | st.sampled_from(["tcp://[::1", "tcp://a:99999", "x/00", "/1", "a/"]))
def test_text_that_is_no_name_or_address_is_a_value_error(text):
    for read in (WorkerId.parse, Address.parse):
        with contextlib.suppress(ValueError):
            assert read(str(read(text))) == read(text)


@given(plain | st.fixed_dictionaries({"kind": st.text(), "message": plain, "attributes": plain}))
def test_no_data_hurts_who_rebuilds_an_error(data):
    assert isinstance(rebuild(data, HERE.id), BaseException)


@pytest.fixture(scope="module")
def asked_registry():
    with RegistryServer() as registry, worker("a/0", registry) as a:
        yield registry, a


@quickly
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["register", "renew", "unregister", "find", "members", "nonsense"]),
            plain,
        ),
        max_size=4,
    )
)
def test_no_request_hurts_a_registry(asked_registry, requests):
    registry, a = asked_registry
    for op, payload in requests:
        asked = {"op": op, "record": payload, "id": payload, "epoch": payload}
        asked |= {"group": payload, "timeout_s": 0.01}
        call = a.call(SERVICE, asked, to=NAME, timeout=5)
        with contextlib.suppress(CommError, CodecError):
            call.result()
    assert WorkerId("a", 0) in [record.id for record in registry.members("a")]


class Stranger:
    """A peer that holds the token, and then sends what it likes."""

    def __init__(self, endpoint, scheme, rank=0):
        address = next(a for a in endpoint.record.addresses if a.scheme == scheme)
        if scheme == "tcp":
            self.socket = socket.create_connection((address.host, address.port))
        else:
            self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.socket.connect("\0" + address.path[1:])
        self.socket.settimeout(20)
        target = Party(endpoint.id, endpoint.epoch)
        dialler = Dialler(Party(WorkerId("stranger", rank), 1), target, endpoint.registry.token)
        self.send(HELLO, dialler.hello)
        proof, _ = dialler.prove(self.read())
        self.send(PROVE, proof)
        self.read()

    def send(self, kind, header, flags=0, tail=b"", *, count=0, tag=0, ident=0):
        prefix = PREFIX.pack(kind, flags, 0, len(header), count, 0, tag, ident, 0)
        with contextlib.suppress(OSError):
            self.socket.sendall(prefix + tail[: count * PLACED.size] + header)

    def send_raw(self, data):
        with contextlib.suppress(OSError):
            self.socket.sendall(data)

    def read(self):
        """The header of the next frame."""
        prefix = PREFIX.unpack(self.socket.recv(PREFIX.size, socket.MSG_WAITALL))
        return self.socket.recv(prefix[3], socket.MSG_WAITALL) if prefix[3] else b""

    def is_hung_up_on(self):
        with contextlib.suppress(ConnectionResetError):
            while self.socket.recv(4096):
                pass
        return True

    def close(self):
        self.socket.close()


@pytest.fixture(scope="module")
def host():
    registry = MemoryRegistry()
    config = CommConfig(backend_priority=("tcp",), max_message_bytes=1 << 24)
    with (
        Endpoint("host/0", registry=registry, config=config) as me,
        Endpoint("friend/0", registry=registry, config=config) as friend,
    ):
        me.serve("echo", lambda request: request.reply(request.payload))
        yield me, friend


def frame(kind, header=b"", rows=b"", *, flags=0, count=0, chunk=0, ident=0, credit=0):
    return PREFIX.pack(kind, flags, 0, len(header), count, chunk, 0, ident, credit) + rows + header


def rows_of(scheme, sizes):
    """Descriptors of buffers that come inline."""
    if scheme == "tcp":
        return b"".join(map(INLINE.pack, sizes))
    return b"".join(PLACED.pack(0, 0, size, 0) for size in sizes)


def conversation(scheme):
    """Valid frames of every kind, one after another."""
    header, buffers = split({"x": np.arange(100.0), "y": [1, "two"], "z": b"z" * 600})
    body = b"".join(bytes(b) + bytes(-b.nbytes % 16) for b in buffers)
    sizes = [b.nbytes for b in buffers]
    short = Shortener()
    twice = [short.shorten(split({"a rather long key": n, "b": 2.0}).header) for n in (1, 2)]
    rows, own = rows_of(scheme, sizes), b""
    if scheme == "unix":
        own = frame(RELEASE, struct.pack("<2Q", 1, 2)) + frame(DROP, struct.pack("<Q", 9))
        own += frame(MESSAGE, header, PLACED.pack(77, 0, 800, 1), count=1)
        own += frame(SEGMENT, struct.pack("<Q", 4096), ident=3) + frame(END)
    return (
        frame(MESSAGE, b"raw", flags=RAW)
        + frame(MESSAGE, header, rows, count=len(sizes))
        + body
        + b"".join(frame(MESSAGE, one, flags=SHORT) for one in twice)
        + frame(MESSAGE, tie([b"1", b"22", b""]), flags=RAW | MANY)
        + frame(CREDIT, credit=1 << 40)
        + frame(REPLY, twice[0], flags=SHORT, ident=4)
        + frame(MESSAGE, header, rows, count=len(sizes), flags=CHUNKED)
        + frame(CHUNK, chunk=len(body))
        + body
        + frame(REQUEST, twice[1], flags=SHORT, ident=8)
        + own
    )


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
@quickly
@given(changes=changes, cut=st.integers(0, 1 << 20))
def test_a_peer_that_sends_nonsense_hurts_nobody(host, scheme, changes, cut):
    me, friend = host
    stranger = Stranger(me, scheme)
    stranger.send_raw(mutated(conversation(scheme), changes, cut))
    stranger.close()
    friend.send("fine", "host/0", tag=9)
    assert me.recv("friend/0", tag=9) == "fine"
    assert friend.call("echo", changes, to="host/0").result() == changes
    eventually(lambda: me._in.peers.get(WorkerId("stranger", 0)).link is None)


BROKEN = {
    "unknown structure": lambda scheme: frame(MESSAGE, b"\x30\x05rest", flags=SHORT),
    "bundle": lambda scheme: frame(MESSAGE, b"\xff\xff\xff\xff", flags=RAW | MANY),
    "huge": lambda scheme: frame(MESSAGE, b"", rows_of(scheme, [1 << 40]), count=1),
    "no chunked message": lambda scheme: frame(CHUNK, chunk=10),
    "two chunked messages": lambda scheme: (
        2 * frame(MESSAGE, b"h", rows_of(scheme, [100]), count=1, flags=CHUNKED)
    ),
}


@pytest.mark.parametrize("scheme", ["tcp", "unix"])
@pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN)
def test_who_breaks_the_protocol_is_hung_up_on(host, scheme, make):
    stranger = Stranger(host[0], scheme)
    stranger.send_raw(make(scheme))
    assert stranger.is_hung_up_on()
    stranger.close()


def test_a_sender_that_dies_between_header_and_payload_delivers_nothing(host):
    me, _ = host
    header, buffers = split({"x": np.arange(1000.0)})
    sizes = b"".join(INLINE.pack(b.nbytes) for b in buffers)
    for rank, flags in ((1, 0), (2, CHUNKED)):
        waiting = me.irecv(f"stranger/{rank}")
        stranger = Stranger(me, "tcp", rank)
        stranger.send_raw(frame(MESSAGE, header, sizes, count=1, flags=flags) + bytes(100 - flags))
        stranger.close()
        with pytest.raises(PeerLost) as caught:
            waiting.result(20)
        assert caught.value.peer == WorkerId("stranger", rank)


def test_a_message_that_claims_much_takes_little(host):
    """The claim is below the limit: memory is taken as the bytes come in."""
    me, _ = host
    stranger = Stranger(me, "tcp")
    tracemalloc.start()
    stranger.send_raw(frame(MESSAGE, b"h", INLINE.pack(900_000), count=1) + bytes(100))
    stranger.close()
    eventually(lambda: me._in.peers.get(WorkerId("stranger", 0)).link is None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000
