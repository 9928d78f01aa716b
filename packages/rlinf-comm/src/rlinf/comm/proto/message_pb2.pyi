from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Header(_message.Message):
    __slots__ = ("structure", "numbers", "reals", "texts", "blobs", "slot")
    STRUCTURE_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    REALS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    BLOBS_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    structure: bytes
    numbers: _containers.RepeatedScalarFieldContainer[int]
    reals: _containers.RepeatedScalarFieldContainer[float]
    texts: _containers.RepeatedScalarFieldContainer[str]
    blobs: _containers.RepeatedScalarFieldContainer[bytes]
    slot: int
    def __init__(self, structure: _Optional[bytes] = ..., numbers: _Optional[_Iterable[int]] = ..., reals: _Optional[_Iterable[float]] = ..., texts: _Optional[_Iterable[str]] = ..., blobs: _Optional[_Iterable[bytes]] = ..., slot: _Optional[int] = ...) -> None: ...

class Structure(_message.Message):
    __slots__ = ("program", "classes", "keys", "names")
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    program: _containers.RepeatedScalarFieldContainer[int]
    classes: _containers.RepeatedCompositeFieldContainer[Class]
    keys: _containers.RepeatedCompositeFieldContainer[Keys]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, program: _Optional[_Iterable[int]] = ..., classes: _Optional[_Iterable[_Union[Class, _Mapping]]] = ..., keys: _Optional[_Iterable[_Union[Keys, _Mapping]]] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class Class(_message.Message):
    __slots__ = ("path", "fields", "definition", "crc")
    PATH_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    DEFINITION_FIELD_NUMBER: _ClassVar[int]
    CRC_FIELD_NUMBER: _ClassVar[int]
    path: str
    fields: _containers.RepeatedScalarFieldContainer[str]
    definition: bytes
    crc: int
    def __init__(self, path: _Optional[str] = ..., fields: _Optional[_Iterable[str]] = ..., definition: _Optional[bytes] = ..., crc: _Optional[int] = ...) -> None: ...

class Keys(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...
