"""Classes taken apart by field: dataclasses, named tuples and enums, and how a class is named.

A class goes by "module:qualified.name". One that the other side may not find by that (of a
script's `__main__`, or of a function's inside) carries its pickled definition as well. Objects are
built without running `__init__`, `__new__` or `__post_init__` of the class, as unpickling does.
"""

import copyreg
import dataclasses
import enum
import functools
import importlib
import operator
import sys
import weakref
import zlib
from collections.abc import Callable
from typing import Any, Final

import cloudpickle

from rlinf.comm.encoding.pickles import encode_pickled, unpickle
from rlinf.comm.encoding.structure import MAX_DEPTH, Op
from rlinf.comm.encoding.walk import ENCODERS, PENDING, Encoder, Refused, Walk
from rlinf.comm.proto.message_pb2 import Class

DEFINITION_BYTES: Final = 1 << 16
MAIN: Final = ("__main__", "__mp_main__")

_SETSTATE: Final = ("", "_dataclass_setstate")

_definitions: "weakref.WeakKeyDictionary[type, bytes]" = weakref.WeakKeyDictionary()


def is_plain_dataclass(kind: type) -> bool:
    """Whether instances are their fields and nothing more, as far as the class tells."""
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        return False
    if kind.__reduce__ is not object.__reduce__ or kind.__reduce_ex__ is not object.__reduce_ex__:
        return False
    if kind in copyreg.dispatch_table:
        return False
    state = getattr(kind, "__getstate__", None)
    own = getattr(object, "__getstate__", None)
    if state is not own and getattr(state, "__name__", "") != "_dataclass_getstate":
        return False
    if getattr(getattr(kind, "__setstate__", None), "__name__", "") not in _SETSTATE:
        return False
    return not _slots(kind) if has_dict(kind) else set(field_names(kind)) == _slots(kind)


def _slots(kind: type) -> set[str]:
    names: set[str] = set()
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names.update((slots,) if isinstance(slots, str) else slots)
    return names - {"__weakref__", "__dict__"}


def has_dict(kind: type) -> bool:
    """Whether instances have a `__dict__`."""
    return bool(kind.__dictoffset__)


@functools.lru_cache(maxsize=4096)
def field_names(kind: type) -> tuple[str, ...]:
    """Names of what is sent of an instance, in order; none for an enum."""
    if issubclass(kind, enum.Enum):
        return ()
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return tuple(getattr(kind, "_fields", ()))


def is_named_tuple(kind: type) -> bool:
    """Whether the type is a plain named tuple."""
    fields = getattr(kind, "_fields", None)
    return (
        issubclass(kind, tuple)
        and not has_dict(kind)
        and isinstance(fields, tuple)
        and all(type(field) is str for field in fields)
        and kind.__reduce__ is object.__reduce__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__base__ is tuple
    )


def encode_record(kind: type) -> Encoder:
    """The encoder of a plain dataclass."""
    names = field_names(kind)
    count = len(names)
    dictionary = has_dict(kind)
    values = _getter(names)

    def encode(walk: Walk, value: Any, depth: int) -> None:
        memo, key = walk.memo, id(value)
        if memo.get(key) is not None or depth > MAX_DEPTH:
            walk.enter(value, depth)
            return
        try:
            items = values(value)
        except AttributeError:
            items = None
        if items is None or (dictionary and len(value.__dict__) != count):
            encode_pickled(walk, value, depth)
            return
        memo[key] = PENDING
        walk.program += (Op.RECORD, walk.classes.setdefault(kind, len(walk.classes)))
        depth += 1
        for item in items:
            ENCODERS[type(item)](walk, item, depth)
        memo[key] = walk.done
        walk.done += 1

    return encode


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    if names:
        only = operator.attrgetter(names[0])
        return lambda value: (only(value),)
    return lambda value: ()


def encode_named(walk: Walk, value: tuple[Any, ...], depth: int) -> None:
    """A named tuple."""
    if walk.enter(value, depth):
        kind = type(value)
        walk.program += (Op.NAMED, walk.classes.setdefault(kind, len(walk.classes)))
        for item in value:
            ENCODERS[type(item)](walk, item, depth + 1)
        walk.leave(value)


def encode_member(walk: Walk, value: enum.Enum, depth: int) -> None:
    """A member of an enum, by name; a combination of flags has none and is pickled."""
    kind = type(value)
    name = value._name_
    if type(name) is not str or kind.__members__.get(name) is not value:
        encode_pickled(walk, value, depth)
        return
    walk.program += (Op.MEMBER, walk.classes.setdefault(kind, len(walk.classes)))
    walk.texts.append(name)


# -- names of classes ------------------------------------------------------------------------------


def describe(kind: type, allow_pickle: bool) -> Class:
    """How a class is named in the structure.

    Raises:
        Refused: It can only be sent by definition, and that needs pickling, which is off.
    """
    module = "__main__" if kind.__module__ in MAIN else kind.__module__
    path = f"{module}:{kind.__qualname__}"
    message = Class(path=path, fields=field_names(kind))
    if module != "__main__" and _find(module, kind.__qualname__) is kind:
        return message
    if allow_pickle and (definition := _definition(kind)):
        message.definition = definition
        message.crc = zlib.crc32(definition)
    elif module != "__main__":
        raise Refused(kind, f"class {path} cannot be found by its name; put it into a module")
    return message


def _definition(kind: type) -> bytes:
    """The pickled class; empty where that fails or is large: then its name has to do."""
    definition = _definitions.get(kind)
    if definition is None:
        try:
            definition = cloudpickle.dumps(kind, protocol=5)
        except Exception:  # noqa: BLE001 - pickles what methods refer to, which raises anything
            definition = b""
        _definitions[kind] = definition = definition if len(definition) < DEFINITION_BYTES else b""
    return definition


def _find(module: str, name: str) -> Any:
    try:
        return operator.attrgetter(name)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def resolve(message: Class, allow_pickle: bool) -> type:
    """The class of this process that a received name means.

    Raises:
        ValueError: There is none, or its fields are others.
    """
    module, _, name = message.path.partition(":")
    found = _find(module, name)
    if found is None and allow_pickle and "<locals>" not in name and module != "__main__":
        try:
            importlib.import_module(module)
        except Exception as error:  # importing runs the module's code
            raise ValueError(f"class {message.path} arrived: {error}") from error
        found = _find(module, name)
    if not _fits(found, message) and message.definition and allow_pickle:
        found = unpickle(message.definition, message.crc, [])
    if not _fits(found, message):
        fields = list(message.fields)
        cure = "import its module" if module not in sys.modules else "put it into a shared module"
        raise ValueError(
            f"class {message.path} with fields {fields} is not known here, or with other fields: "
            f"{cure}"
        )
    return found  # type: ignore[no-any-return]


def _fits(kind: object, message: Class) -> bool:
    if not isinstance(kind, type) or field_names(kind) != tuple(message.fields):
        return False
    return issubclass(kind, enum.Enum) or is_named_tuple(kind) or is_plain_dataclass(kind)
