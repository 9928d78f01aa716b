"""Protobuf messages: `message.proto` and the code generated from it."""

__all__: list[str] = []
