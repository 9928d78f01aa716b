"""A device without a device, for tests: tensors that only know their size and where they are."""

from pathlib import Path
from typing import Any

from rlinf.channel.cache import map_leaves


class FakeTensor:
    """So many bytes of some value, on a device or on the host."""

    def __init__(self, value: int, nbytes: int, *, on_device: bool = True) -> None:
        self.value = value
        self.nbytes = nbytes
        self.on_device = on_device


class FakeMemory:
    """See `rlinf.channel.cache.Memory`.

    Args:
        room_bytes: Of the device.
    """

    def __init__(self, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        self.moves: list[str] = []

    def device_bytes(self, item: object) -> int:
        """Bytes of the tensors on the device."""
        found: list[FakeTensor] = []

        def look(leaf: Any) -> Any:
            if isinstance(leaf, FakeTensor) and leaf.on_device:
                found.append(leaf)
            return leaf

        map_leaves(item, look)
        return sum(tensor.nbytes for tensor in found)

    def free_bytes(self) -> int:
        """All of it."""
        return self.room_bytes

    def own(self, item: object) -> object:
        """Fake tensors do not change."""
        return item

    def to_host(self, item: Any) -> Any:
        """Every tensor on the host."""
        return self._moved(item, on_device=False)

    def to_device(self, item: Any) -> Any:
        """Every tensor on the device."""
        return self._moved(item, on_device=True)

    def to_disk(self, item: Any, path: Path) -> Any:
        """A file with the tensor's value."""
        self.moves.append("to_disk")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{item.value} {item.nbytes}")
        return path

    def from_disk(self, item: Any) -> Any:
        """The tensor of a file."""
        self.moves.append("from_disk")
        value, nbytes = map(int, item.read_text().split())
        item.unlink()
        return FakeTensor(value, nbytes, on_device=False)

    def _moved(self, item: Any, *, on_device: bool) -> Any:
        self.moves.append("to_device" if on_device else "to_host")

        def move(leaf: Any) -> Any:
            if isinstance(leaf, FakeTensor):
                return FakeTensor(leaf.value, leaf.nbytes, on_device=on_device)
            return leaf

        return map_leaves(item, move)
