"""Just enough of protocol buffers to read a `tf.train.Example` without TensorFlow.

An Example is a map from names to lists of bytes, floats or integers:
`Example{1: Features{1: repeated Entry{1: name, 2: Feature{1: BytesList{1: repeated bytes}}}}}`.
"""

from collections.abc import Iterator

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}


def parse_example(raw: bytes) -> dict[str, object] | None:
    """Parses a serialised `tf.train.Example`.

    Args:
      raw: The message.

    Returns:
      Feature name to its bytes; features that are not exactly one string of bytes are None.
      None if `raw` is no such message with at least one feature.
    """
    try:
        (features,) = _only_first(raw)
        entries = [dict(_fields(entry)) for entry in _only_first(features)]
        return {entry[1].decode(): _one_text(entry[2]) for entry in entries} or None
    except (ValueError, KeyError, IndexError):
        return None


def _one_text(feature: bytes) -> bytes | None:
    values = [
        value for kind, values in _fields(feature) if kind == 1 for _, value in _fields(values)
    ]
    return values[0] if len(values) == 1 else None


def _only_first(raw: bytes) -> list[bytes]:
    fields = list(_fields(raw))
    if any(number != 1 for number, _ in fields):
        raise ValueError("another field than 1")
    return [value for _, value in fields]


def _fields(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields (field number, content) of a message; of numbers, which no caller reads, b""."""
    place = 0
    while place < len(raw):
        tag, place = _varint(raw, place)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            _, place = _varint(raw, place)
            yield number, b""
            continue
        if wire == _LENGTH:
            size, place = _varint(raw, place)
        else:
            size = _FIXED_BYTES[wire]
        if number == 0 or place + size > len(raw):
            raise ValueError("not a message")
        yield number, raw[place : place + size] if wire == _LENGTH else b""
        place += size


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
