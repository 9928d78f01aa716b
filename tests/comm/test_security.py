"""Who is let in, and what: tokens, certificates, pickles, sizes."""

import datetime
import logging
import socket
import ssl
import threading
import time

import numpy as np
import pytest
import trustme

from rlinf.comm import (
    AuthenticationError,
    CodecError,
    CommConfig,
    ConfigError,
    Endpoint,
    MemoryRegistry,
    NoTransport,
    PeerLost,
    RegistryClient,
    RegistryServer,
)
from rlinf.comm.testing import TransportTests
from rlinf.comm.transports.tls import TlsSocket

TCP = ("tcp",)


def written(folder, ca, cert):
    """Settings with these certificates, in files."""
    paths = [folder / name for name in ("cert.pem", "key.pem", "ca.pem")]
    cert.cert_chain_pems[0].write_to_path(paths[0])
    cert.private_key_pem.write_to_path(paths[1])
    ca.cert_pem.write_to_path(paths[2])
    names = ("tls_cert", "tls_key", "tls_ca")
    files = dict(zip(names, map(str, paths), strict=True))
    return CommConfig(**files, backend_priority=TCP, connection_timeout_s=30.0)


@pytest.fixture(scope="module")
def ca():
    return trustme.CA()


@pytest.fixture(scope="module")
def encrypted(ca, tmp_path_factory):
    return written(tmp_path_factory.mktemp("good"), ca, ca.issue_cert("worker.local"))


@pytest.fixture
def pair_of(request):
    """Endpoints of one registry in this process, which do not take the way in process."""
    open_ones = []

    def make(*configs):
        registry = MemoryRegistry()
        for number, config in enumerate(configs):
            open_ones.append(Endpoint(f"w/{number}", registry=registry, config=config))
        return open_ones

    yield make
    for endpoint in open_ones:
        endpoint.close()


def test_messages_of_all_sizes_over_tls(pair_of, encrypted):
    a, b = pair_of(encrypted, encrypted)
    assert {x.scheme for x in a.record.addresses} >= {"tls", "unix"}
    for size in (0, 1, 5000, 70_000, 30_000_000):
        sent = np.random.default_rng(size).integers(0, 255, size, np.uint8)
        handle = b.irecv("w/0")
        a.send({"x": sent, "n": size}, "w/1")
        assert (handle.result()["x"] == sent).all()
    assert a.statistics().connections == {"w/1": "tcp"}
    for number in range(2000):
        a.isend(number, "w/1")
    assert [b.recv("w/0") for _ in range(2000)] == list(range(2000))


def test_both_directions_at_once_over_tls(pair_of, encrypted):
    a, b = pair_of(encrypted, encrypted)
    data = np.arange(3_000_000)
    sent = [a.isend(data, "w/1"), b.isend(-data, "w/0")]
    assert (b.recv("w/0") == data).all()
    assert (a.recv("w/1") == -data).all()
    for handle in sent:
        handle.wait()


def test_openssl_is_never_called_by_two_threads_at_once():
    """It forgets then what a call waited for, and takes that for the end of the connection."""

    class OpenSsl:
        inside = overlapped = False

        def send(self, data):
            return self.called(len(data))

        def recv_into(self, room):
            return self.called(room.nbytes)

        def called(self, count):
            self.overlapped |= self.inside
            self.inside = True
            time.sleep(0.001)
            self.inside = False
            return count

    sock = TlsSocket(OpenSsl())
    reader = threading.Thread(
        target=lambda: [sock.recv_into(memoryview(bytearray(1))) for _ in range(50)]
    )
    reader.start()
    for _ in range(50):
        sock.send(b"x")
    reader.join(10)
    assert not sock.overlapped


def test_what_goes_over_the_wire_is_not_the_message(pair_of, encrypted):
    """A listener between the two sees no byte of it."""
    a, b = pair_of(encrypted, encrypted)
    address = next(x for x in b.record.addresses if x.scheme == "tls")
    with socket.create_connection((address.host, address.port)) as raw:
        raw.settimeout(5.0)
        raw.sendall(b"RLnf in the clear")
        answer = raw.recv(1000)
    assert b"RLnf" not in answer
    a.send("still there", "w/1")
    assert b.recv("w/0") == "still there"


def test_a_certificate_of_another_ca_is_refused(pair_of, encrypted, ca, tmp_path):
    other = trustme.CA()
    stranger = written(tmp_path, ca, other.issue_cert("worker.local"))
    a, b = pair_of(stranger, encrypted)
    with pytest.raises(AuthenticationError, match=r"w/1 over tls: .*(unknown ca|certificate)"):
        a.send(1, "w/1")
    with pytest.raises(AuthenticationError, match="w/0 over tls"):
        b.send(1, "w/0")


def test_an_expired_certificate_is_refused(pair_of, encrypted, ca, tmp_path):
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    expired = written(tmp_path, ca, ca.issue_cert("worker.local", not_after=past))
    a, b = pair_of(expired, encrypted)
    with pytest.raises(AuthenticationError, match="certificate has expired"):
        b.send(1, "w/0")
    with pytest.raises(AuthenticationError, match=r"w/1 over tls: .*expired"):
        a.send(1, "w/1")


def test_a_plain_worker_does_not_reach_one_with_tls(pair_of, encrypted):
    plain = CommConfig(connection_timeout_s=30.0)
    a, _ = pair_of(plain, encrypted)
    a._in.manager.me = remote(a._in.manager.me)
    with pytest.raises(NoTransport, match=r"tcp \(w/1 does not listen on it"):
        a.send(1, "w/1")


def remote(record):
    """As if it were on another host."""
    import dataclasses

    return dataclasses.replace(record, host="elsewhere")


def test_a_plain_client_at_a_tls_port_is_dropped_with_a_word_in_the_log(pair_of, encrypted, caplog):
    (b,) = pair_of(encrypted)
    address = next(x for x in b.record.addresses if x.scheme == "tls")
    with (
        caplog.at_level(logging.WARNING),
        socket.create_connection((address.host, address.port)) as raw,
    ):
        raw.settimeout(5.0)
        raw.sendall(b"\0" * 64)
        while raw.recv(1000):
            pass
    assert "a peer that dialled was refused: TLS: wrong version number" in caplog.text


def test_a_client_without_a_certificate_is_refused(pair_of, encrypted):
    (b,) = pair_of(encrypted)
    address = next(x for x in b.record.addresses if x.scheme == "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(encrypted.tls_ca)
    with (
        socket.create_connection((address.host, address.port)) as raw,
        context.wrap_socket(raw) as sock,
        pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"),
    ):
        sock.settimeout(5.0)
        sock.recv(10)


def test_a_registry_and_its_clients_over_tls(encrypted):
    with RegistryServer(config=encrypted) as registry:
        assert registry.address.startswith("tls://")
        client = RegistryClient(registry.address, registry.token)
        with Endpoint("a/0", registry=client, config=encrypted) as a:
            assert [str(r.id) for r in a.registry.members()] == ["a/0", "registry/0"]
        stranger = RegistryClient(registry.address, b"another token" * 3)
        with pytest.raises(AuthenticationError, match="token"):
            Endpoint("b/0", registry=stranger, config=encrypted)


def test_the_wrong_token_is_refused():
    with RegistryServer() as registry:
        client = RegistryClient(registry.address, b"x" * 32)
        quick = CommConfig(connection_timeout_s=30.0)
        with pytest.raises(AuthenticationError, match="token"):
            Endpoint("a/0", registry=client, config=quick)


def test_settings_that_make_no_sense(tmp_path, encrypted):
    with pytest.raises(ConfigError, match="belong together"):
        CommConfig(tls_cert="cert.pem")
    missing = str(tmp_path / "absent.pem")
    broken = encrypted.with_values({"tls_key": missing})
    with pytest.raises(ConfigError, match=r"absent\.pem"):
        Endpoint("a/0", registry=MemoryRegistry(), config=broken)
    with pytest.raises(ConfigError, match=r"log_level is 'LOUD'; known are .*DEBUG"):
        CommConfig.from_environment({"LOG_LEVEL": "LOUD"})


class Unknown:
    pass


def test_pickles_are_refused_at_both_ends_by_path(pair_of):
    strict = CommConfig(allow_pickle=False, connection_timeout_s=30.0)
    a, b = pair_of(strict, CommConfig())
    with pytest.raises(CodecError, match=r"\$.items\[1\].*needs pickling, which is off") as caught:
        a.send({"items": [1, Unknown()]}, "w/1")
    assert caught.value.path == "$.items[1]"
    b.send({"items": [1, Unknown()]}, "w/0")
    with pytest.raises(CodecError, match="pickling is off here"):
        a.recv("w/1")
    b.send({"plain": np.ones(3)}, "w/0")
    assert a.recv("w/1")["plain"].sum() == 3


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_message_over_the_limit_ends_the_connection_before_it_is_allocated(pair_of, transport):
    large = CommConfig(backend_priority=(transport,), connection_timeout_s=30.0)
    small = large.with_values({"max_message_bytes": 1 << 20})
    a, b = pair_of(large, small)
    a.send(b"x" * 1000, "w/1")
    assert b.recv("w/0") == b"x" * 1000
    asked = b.irecv("w/0")
    handle = a.isend(b"x" * (2 << 20), "w/1")
    if transport == "tcp":
        with pytest.raises(PeerLost, match="max_message_bytes=1048576"):
            asked.result()
    else:  # nothing is allocated for what lies in the sender's memory
        assert len(asked.result()) == 2 << 20
    handle.wait()


@pytest.mark.slow
class TestTls(TransportTests):
    """The whole conformance suite, encrypted."""

    transport = "tcp"

    @pytest.fixture
    def registry(self, encrypted):
        type(self).config = encrypted.with_values({"connection_timeout_s": 30.0})
        with RegistryServer(config=encrypted) as server:
            yield server


def test_log_level_shows_what_was_chosen(capsys):
    logger = logging.getLogger("rlinf")
    before, propagate, handlers = logger.level, logger.propagate, logger.handlers[:]
    logger.propagate = False
    try:
        config = CommConfig.from_environment({"LOG_LEVEL": "info"})
        registry = MemoryRegistry()
        with (
            Endpoint("a/0", registry=registry, config=config) as a,
            Endpoint("b/0", registry=registry) as b,
        ):
            a.send(1, "b/0")
            b.recv("a/0")
        assert "INFO rlinf.comm.manager" in capsys.readouterr().err
    finally:
        logger.level, logger.propagate, logger.handlers[:] = before, propagate, handlers
