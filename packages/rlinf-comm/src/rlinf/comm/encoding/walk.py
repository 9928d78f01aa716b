"""Walk: what one pass over an object collects, and the way it is written down."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from rlinf.comm.encoding.structure import MAX_DEPTH, Op

PENDING: Final = -1

Encoder = Callable[["Walk", Any, int], None]


class Refused(Exception):
    """A leaf cannot be encoded; `leaf` is the object, to find its path by."""

    def __init__(self, leaf: object, why: str) -> None:
        super().__init__(why)
        self.leaf = leaf
        self.why = why


class TooDeep(Exception):
    """The object contains itself, or is nested deeper than `MAX_DEPTH`."""


class Forgetful(dict[int, int]):
    """The memo inside what is hashed (set elements, keys): nothing there is ever a reference.

    A tuple shared many times over would take exponential time to hash; whoever has such an object
    in a set has already spent it, but a decoder must not be made to.
    """

    __slots__ = ()

    def get(self, key: int, default: Any = None) -> Any:
        """Nothing is remembered."""
        return None

    def __setitem__(self, key: int, value: int) -> None:
        return


class Windows:
    """Where arrays that share memory lie in each other; arrays go by their ids.

    Attributes:
        owner: In which other array one lies.
        offset: How many bytes into it.
        buffers: The number of the buffer of an array that lies in no other, once it is written.
        patches: Places among the numbers where the buffer of such an array is to be put.
    """

    __slots__ = ("buffers", "offset", "owner", "patches")

    def __init__(self) -> None:
        self.owner: dict[int, int] = {}
        self.offset: dict[int, int] = {}
        self.buffers: dict[int, int] = {}
        self.patches: list[tuple[int, int]] = []


class Walk:
    """The lists that encoders fill. One use, one thread.

    Attributes:
        program: Operations and their arguments.
        memo: Ids of objects seen: the number of a finished one, PENDING for one being walked.
            Everything in it is kept alive by the root object or by `keep`.
        done: How many objects are finished.
        views: Ids of the bases of the numpy arrays that are views.
        arrays: Every array with a buffer, numpy or torch, in order.
        spans: Address and size of the memory of every torch tensor.
        windows: On the second pass over an object with shared memory, what to share.
        kinds: Kinds of device whose tensors stay there.
        careful: Whether strings with lone surrogates are to be expected.
    """

    __slots__ = (
        "allow_pickle", "arrays", "blobs", "buffers", "careful", "classes", "done", "keep", "keys",
        "kinds", "memo", "names", "numbers", "program", "reals", "spans", "texts",
        "views", "windows",
    )  # fmt: skip

    def __init__(
        self,
        allow_pickle: bool,
        careful: bool,
        windows: Windows | None,
        kinds: frozenset[str] = frozenset(),
    ) -> None:
        self.allow_pickle = allow_pickle
        self.kinds = kinds
        self.careful = careful
        self.windows = windows
        self.program: list[int] = []
        self.numbers: list[int] = []
        self.reals: list[float] = []
        self.texts: list[str] = []
        self.blobs: list[bytes] = []
        self.buffers: list[memoryview] = []
        self.keys: dict[tuple[str, ...], int] = {}
        self.classes: dict[type, int] = {}
        self.names: dict[str, int] = {}
        self.memo: dict[int, int] = {}
        self.done = 0
        self.keep: list[object] = []
        self.views: list[int] = []
        self.arrays: list[Any] = []
        self.spans: list[tuple[int, int]] = []

    def enter(self, value: object, depth: int) -> bool:
        """Begin an object that may be referred to again; False: it was, and that is all.

        Raises:
            TooDeep: The object is inside itself, or too deep.
        """
        key = id(value)
        number = self.memo.get(key)
        if number is None:
            if depth > MAX_DEPTH:
                raise TooDeep
            self.memo[key] = PENDING
            return True
        if number == PENDING:
            raise TooDeep
        self.program += (Op.REF, number)
        return False

    def leave(self, value: object) -> None:
        """Finish an object begun with `enter`."""
        self.memo[id(value)] = self.done
        self.done += 1

    def name(self, text: str) -> int:
        """The index of a name in the structure."""
        return self.names.setdefault(text, len(self.names))


class Encoders(dict[type, Encoder]):
    """Encoders by exact type, filled by classify.py, which is asked once for every new type."""

    __slots__ = ("classify", "known")
    LIMIT: Final = 4096

    def __init__(self) -> None:
        super().__init__()
        self.classify: Callable[[type], Encoder] | None = None
        self.known: Mapping[type, Encoder] = {}

    def __missing__(self, kind: type) -> Encoder:
        if not self:
            self.update(self.known)
        if len(self) >= self.LIMIT:
            self.clear()
        assert self.classify is not None
        encoder = self.known.get(kind) or self.classify(kind)
        return self.setdefault(kind, encoder)


ENCODERS: Final = Encoders()
