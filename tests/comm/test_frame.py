import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.comm import ProtocolError
from rlinf.comm.frame import (
    CHUNK,
    CHUNKED,
    HELLO,
    INLINE,
    MESSAGE,
    PREFIX,
    REQUEST,
    Outgoing,
    allocate,
    padded,
)
from rlinf.comm.reader import Body, Reader


def wire(kind=MESSAGE, header=b"", buffers=(), tag=0, ident=0, service=b"", chunk=0):
    """The frame as a link writes it; in chunks of `chunk` bytes if that is not 0."""
    body = b"".join(bytes(b) + bytes(padded(len(b)) - len(b)) for b in buffers)
    flags = CHUNKED if chunk else 0
    sizes = b"".join(INLINE.pack(len(b)) for b in buffers)
    head = PREFIX.pack(kind, flags, len(service), len(header), len(buffers), 0, tag, ident, 5)
    out = head + service + sizes + header
    if not chunk:
        return out + body
    for start in range(0, len(body), chunk):
        piece = body[start : start + chunk]
        out += PREFIX.pack(CHUNK, 0, 0, 0, 0, len(piece), 0, 0, 0) + piece
    return out


def feed(reader, data, cuts=()):
    """Feed bytes in pieces and collect the frames."""
    frames = []
    position = 0
    for cut in [*sorted(c for c in cuts if c < len(data)), len(data)]:
        while position < cut:
            room = reader.space()
            assert room.nbytes
            count = min(room.nbytes, cut - position)
            room[:count] = data[position : position + count]
            reader.filled(room, count)
            position += count
            while (frame := reader.next()) is not None:
                frames.append(frame)
    return frames


def reader(limit=1 << 30, authenticated=True):
    made = Reader(placed=False, limit_bytes=limit)
    if authenticated:
        made.authenticate()
    return made


frames = st.lists(
    st.tuples(
        st.integers(-(2**63), 2**63 - 1),
        st.binary(max_size=60),
        st.binary(max_size=20),
        st.lists(st.one_of(st.binary(max_size=40), st.integers(0, 200_000)), max_size=4),
        st.booleans(),
    ),
    max_size=5,
)


@settings(max_examples=100, deadline=None)
@given(frames, st.lists(st.integers(0, 600_000), max_size=6))
def test_frames_cut_anywhere_come_out_whole(described, cuts):
    data, expected = b"", []
    for tag, header, service, buffers, chunked in described:
        filled = [b if isinstance(b, bytes) else bytes([tag & 255]) * b for b in buffers]
        chunk = 50_000 if chunked and any(len(b) for b in filled) else 0
        data += wire(REQUEST, header, filled, tag=tag, ident=9, service=service, chunk=chunk)
        expected.append((tag, header, service, filled))
    got = [
        (f.tag, f.header, f.service, [bytes(b) for b in f.buffers])
        for f in feed(reader(), data, cuts)
    ]
    assert got == expected


def test_small_frames_pass_between_the_chunks_of_a_large_one():
    large = wire(header=b"L", buffers=[b"x" * 100_000], chunk=40_000)
    first_chunk_end = PREFIX.size + INLINE.size + 1 + PREFIX.size + 40_000
    data = large[:first_chunk_end] + wire(header=b"s", tag=1) + large[first_chunk_end:]
    assert [f.header for f in feed(reader(), data)] == [b"s", b"L"]


def test_large_buffers_have_memory_of_their_own_and_all_are_aligned():
    body = Body([10, 200_000, 3, 7, 100_000], allocate)
    assert [b.nbytes for b in body.buffers] == [10, 200_000, 3, 7, 100_000]
    owners = [id(b.obj) for b in body.buffers]
    assert owners[2] == owners[3]
    assert len(set(owners)) == 4
    for buffer in body.buffers:
        assert np.frombuffer(buffer, np.uint8).ctypes.data % 16 == 0


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_are_frames_or_an_error(data, placed):
    made = Reader(placed=placed, limit_bytes=1 << 16)
    made.authenticate()
    with contextlib.suppress(ProtocolError):
        feed(made, data)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_frame_with_a_wrong_byte_is_a_frame_or_an_error(position, value):
    data = bytearray(wire(header=b"h" * 30, buffers=[b"a" * 50, b"b" * 60], service=b"svc"))
    data[position % len(data)] = value
    with contextlib.suppress(ProtocolError):
        feed(reader(limit=1 << 16), bytes(data))


@pytest.mark.parametrize(
    "data",
    [
        wire(MESSAGE, b"x"),
        wire(HELLO, b"x" * 5000),
        wire(HELLO, b"", [b"x"]),
    ],
)
def test_before_authentication_only_small_handshake_frames_are_read(data):
    with pytest.raises(ProtocolError, match="before authentication"):
        feed(reader(authenticated=False), data)


def test_a_claim_of_too_many_bytes_is_refused_before_they_are_allocated():
    for claim in (
        PREFIX.pack(MESSAGE, 0, 0, 1 << 31, 0, 0, 0, 0, 0),
        PREFIX.pack(MESSAGE, 0, 0, 0, 1, 0, 0, 0, 0) + INLINE.pack(1 << 50),
        PREFIX.pack(CHUNK, 0, 0, 0, 0, 10, 0, 0, 0),
    ):
        with pytest.raises(ProtocolError):
            feed(reader(limit=1 << 20), claim)


@pytest.mark.parametrize("size", [2**31 - 1, 2**31, 2**32, 2**33])
def test_sizes_beyond_31_and_32_bits_are_kept(size):
    made = []

    def memory(nbytes):
        made.append(nbytes)
        return memoryview(b"")

    body = Body.__new__(Body)
    body.__init__([0, size], memory)
    assert padded(size) in made
    assert body.left == padded(size)


def test_what_the_sender_may_change_is_copied():
    changing, constant = bytearray(b"abc"), b"def"
    frame = Outgoing(MESSAGE, b"", (memoryview(changing), memoryview(constant)))
    frame.own()
    changing[0] = 0
    assert bytes(frame.buffers[0]) == b"abc"
    assert frame.buffers[1].obj is constant
