import pytest

from rlinf.comm import CommConfig
from rlinf.comm.testing import TransportTests


class TestInproc(TransportTests):
    transport = "inproc"
    one_process = True


class TestTcp(TransportTests):
    transport = "tcp"


class TestShm(TransportTests):
    transport = "shm"


@pytest.mark.slow
class TestTcpInSmallChunks(TransportTests):
    transport = "tcp"
    config = CommConfig(chunk_bytes=1 << 13)


@pytest.mark.slow
class TestShmWithASmallPool(TransportTests):
    transport = "shm"
    config = CommConfig(pool_bytes=128 << 20, inline_bytes=64)


@pytest.mark.slow
class TestGloo(TransportTests):
    transport = "gloo"
