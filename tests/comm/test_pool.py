import gc
import random
import resource
import subprocess
import sys

import numpy as np
import pytest

from rlinf.comm import PoolExhausted, ProtocolError
from rlinf.comm.pool import Pool, Shelf, available_bytes
from rlinf.comm.segment import ATLAS, PAGE, ForeignSegment, OwnSegment, address_of, missing

needs_memfd = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.parametrize("seed", range(20))
def test_a_shelf_never_gives_a_place_twice(seed):
    chance = random.Random(seed)
    shelf, taken = Shelf(1000), {}
    for _ in range(400):
        if taken and chance.random() < 0.5:
            start = chance.choice(list(taken))
            shelf.give(start, taken.pop(start))
        else:
            length = chance.randint(1, 200)
            start = shelf.take(length)
            if start is None:
                continue
            for other, size in taken.items():
                assert start + length <= other or other + size <= start
            assert 0 <= start <= 1000 - length
            taken[start] = length
    assert shelf.used == sum(taken.values())
    for start, length in taken.items():
        shelf.give(start, length)
    assert shelf.take(1000) == 0


@needs_memfd
def test_a_place_is_used_again_once_the_last_view_is_gone():
    pool = Pool(1 << 20)
    first = pool.allocate(100_000).array
    address = first.ctypes.data
    view = memoryview(first)[10:20]
    del first
    second = pool.allocate(100_000).array
    assert second.ctypes.data != address
    del view
    gc.collect()
    third = pool.allocate(100_000).array
    assert third.ctypes.data == address


@needs_memfd
def test_a_full_pool_gives_nothing_and_says_how_full():
    pool = Pool(1 << 20)
    kept = [pool.allocate(1 << 18) for _ in range(4)]
    assert pool.allocate(1) is None
    assert pool.statistics().used_bytes == 1 << 20
    kept.pop()
    assert pool.allocate(1) is not None
    with pytest.raises(PoolExhausted, match="pool_bytes=1048576"):
        pool.allocate((1 << 20) + 1)


@needs_memfd
def test_a_pool_grows_and_gives_back_what_is_idle():
    pool = Pool(1 << 30)
    large = [pool.allocate(80 << 20), pool.allocate(80 << 20)]
    assert pool.statistics().segments == 2
    large.clear()
    pool.trim()
    assert pool.statistics().segments == 2
    pool.trim()
    assert pool.statistics().size_bytes == 0


@needs_memfd
def test_a_pool_larger_than_the_memory_there_is_fails_at_once():
    with pytest.raises(PoolExhausted, match="lower pool_bytes"):
        Pool(available_bytes() * 4)


@needs_memfd
def test_what_the_system_refuses_is_one_clear_error():
    program = """
import resource
from rlinf.comm.pool import Pool
from rlinf.comm import PoolExhausted
pool = Pool(1 << 30)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    pool.allocate(4 << 20)
except PoolExhausted as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "does not give" in done.stdout, done.stderr
    assert resource.RLIMIT_FSIZE is not None


def attached(own):
    import os

    return ForeignSegment.attach(own.uid, os.dup(own.fd), own.size)


@needs_memfd
def test_what_a_receiver_writes_is_its_own_and_is_let_go_of():
    own = OwnSegment.create(16 * PAGE)
    mine = own.slice(0, own.size)
    mine[:] = 1
    other = attached(own)
    theirs = other.slice(2 * PAGE, 3 * PAGE)
    assert other.hold(2 * PAGE, 3 * PAGE)
    assert other.is_pristine(2 * PAGE, 3 * PAGE)
    theirs[5] = 9
    assert not other.is_pristine(2 * PAGE, 3 * PAGE)
    assert mine[2 * PAGE + 5] == 1
    other.restore([(2 * PAGE, 3 * PAGE)])
    mine[:] = 2
    assert (theirs == 2).all()


@needs_memfd
def test_a_page_is_held_by_one_array_at_a_time():
    own = OwnSegment.create(16 * PAGE)
    own.slice(0, own.size)[:] = 3
    other = attached(own)
    assert other.hold(PAGE, 2 * PAGE)
    assert not other.hold(2 * PAGE, 10)
    assert not other.hold(0, PAGE + 1)
    assert not other.hold(0, own.size)
    assert other.hold(0, PAGE)
    assert other.hold(3 * PAGE, 1)
    other.slice(PAGE, 1)[0] = 7
    assert bytes(other.copy(PAGE, 4)) == b"\3\3\3\3"
    other.restore([(PAGE, 2 * PAGE), (0, PAGE)])
    assert other.hold(0, PAGE)
    assert other.hold(2 * PAGE, 10)


@needs_memfd
def test_the_atlas_knows_what_lies_in_shared_memory():
    own = OwnSegment.create(4 * PAGE)
    start = own.address
    assert ATLAS.find(start + 10, 20) is own
    assert ATLAS.find(start, 5 * PAGE) is None
    assert ATLAS.find(address_of(memoryview(np.zeros(10))), 10) is None
    del own
    gc.collect()
    assert ATLAS.find(start + 10, 20) is None


@needs_memfd
def test_a_segment_smaller_than_claimed_or_unsealed_is_refused():
    import os

    own = OwnSegment.create(4 * PAGE)
    with pytest.raises(ProtocolError):
        ForeignSegment.attach(own.uid, os.dup(own.fd), 5 * PAGE)
    unsealed = os.memfd_create("x")
    os.ftruncate(unsealed, PAGE)
    with pytest.raises(ProtocolError):
        ForeignSegment.attach(1, unsealed, PAGE)


@needs_memfd
def test_nobody_else_can_map_a_segment_for_writing():
    import mmap

    own = OwnSegment.create(PAGE)
    with pytest.raises(PermissionError):
        mmap.mmap(own.fd, PAGE)
