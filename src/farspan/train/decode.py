"""Dataclasses from plain values, such as those of a JSON file; names and types are checked."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from farspan.errors import unknown_choice

Decoded = TypeVar("Decoded")

_KINDS: dict[Any, tuple[str, str]] = {  # in words, and how it is written
    int: ("a whole number", "digits alone, such as 65536"),
    float: ("a number", "digits, such as 0.0003 or 3e-4"),
    bool: ("true or false", "true or false"),
    str: ("text", "quotation marks"),
}


def decode(kind: type[Decoded], values: Mapping[str, Any], where: str, path: str = "") -> Decoded:
    """Makes a dataclass from a mapping of its fields.

    Args:
      kind: A dataclass. Its fields are whole numbers, numbers, truth values, texts, choices of
        text, dataclasses and tuples of one of these, or one of these or None.
      values: Field to value, nested where fields are dataclasses, lists where they are tuples. What
        is missing takes its default.
      where: What holds the values, for messages.
      path: Fields that lead to these values, each followed by a dot, for messages.

    Returns:
      The dataclass.

    Raises:
      ValueError: A name is unknown, a value has another type than its field, or a field without
        default is missing.
    """
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(cast("Any", kind))}
    for name in values:
        if name not in fields:
            raise unknown_choice(f"{where}: a name in {path.rstrip('.') or 'it'}", name, fields)
    missing = [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(
            f"{where}: {', '.join(path + name for name in missing)} must be given, got "
            f"{', '.join(values) or 'nothing'}; add {missing[0]}"
        )
    return kind(
        **{name: _value(hints[name], value, where, path + name) for name, value in values.items()}
    )


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _value(kind: Any, value: Any, where: str, path: str) -> Any:
    kinds = alternatives(kind)
    for each in kinds:
        if dataclasses.is_dataclass(each) and isinstance(value, Mapping):
            return decode(cast("type[Any]", each), value, where, f"{path}.")
        if get_origin(each) is tuple and isinstance(value, (list, tuple)):
            items = enumerate(cast("list[Any]", value))
            return tuple(_value(get_args(each)[0], x, where, f"{path}[{i}]") for i, x in items)
        if get_origin(each) is Literal:
            if value in get_args(each):
                return value
            raise unknown_choice(f"{where}: {path}", value, get_args(each))
        if type(value) is each:
            return value
    if float in kinds and type(value) is int:
        return float(value)
    words, remedy = _describe(next(each for each in kinds if each is not types.NoneType))
    raise ValueError(f"{where}: {path} must be {words}, got {value!r}; use {remedy}")


def _describe(kind: Any) -> tuple[str, str]:
    if get_origin(kind) is tuple:
        return "a list", "[...], or leave it out"
    return _KINDS.get(kind, ("an object", "{...}, or leave it out"))
