"""Classes that a script defines."""

import subprocess
import sys

import pytest

from rlinf.comm.codec import join
from rlinf.comm.errors import CodecError

SCRIPT = """
import dataclasses, enum, multiprocessing, sys
from rlinf.comm.codec import join, split

@dataclasses.dataclass
class Item:
    x: int

class Mode(enum.Enum):
    ON = 1

class Plain:
    pass

def child(pipe):
    item, mode, plain = join(*pipe.recv())
    assert type(item) is Item and mode is Mode.ON, (type(item), mode)
    header, buffers = split([Item(item.x + 1), Mode.ON, Plain()])
    pipe.send((header, [bytes(b) for b in buffers]))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=child, args=(there,))
    process.start()
    header, buffers = split([Item(1), Mode.ON, Plain()])
    here.send((header, [bytes(b) for b in buffers]))
    assert here.poll(60)
    item, mode, plain = join(*here.recv())
    assert type(item) is Item and item.x == 2 and mode is Mode.ON and type(plain) is Plain
    process.join(60)
    assert process.exitcode == 0
    sys.stdout.write(header.hex())
"""


def test_classes_of_a_script_are_its_own_in_its_children_and_travel_to_strangers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    item, mode, plain = join(bytes.fromhex(done.stdout))
    assert item.x == 1
    assert type(item).__name__ == "Item"
    assert mode.name == "ON"
    assert type(plain).__name__ == "Plain"
    with pytest.raises(CodecError, match="shared module"):
        join(bytes.fromhex(done.stdout), allow_pickle=False)
