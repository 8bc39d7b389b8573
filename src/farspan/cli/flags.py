"""Flags from the fields of nested dataclasses: `seq_len` becomes `--seq-len`.

A field that is a tuple of dataclasses becomes a flag that takes one word for each of them:
`--stages from_step=1000,seq_len=65536 from_step=1200,seq_len=1048576`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from farspan.errors import unknown_choice
from farspan.train.decode import alternatives, decode

if TYPE_CHECKING:
    from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

Config = TypeVar("Config")

_TRUTH_VALUES = ("true", "false", "0", "1", "yes", "no", "on", "off")


def parse_flags(
    default: Config, arguments: Sequence[str], *, prog: str, description: str
) -> Config:
    """Overrides fields of a configuration by flags.

    Args:
      default: A dataclass instance; fields that are dataclasses themselves are flattened, so field
        names must be unique.
      arguments: Flags as typed; `-` and `_` are the same.
      prog: The command so far, for help and errors.
      description: First sentence of the help.

    Returns:
      A configuration of the same type.

    Raises:
      ValueError: A flag, the value of a flag with fixed choices, or a key in a word of pairs is
        unknown, and the message names the nearest; or a word of pairs has another mistake.
      SystemExit: After printing help (0), or an error in a value (2).
    """
    _check_names(arguments, field_types(default), prog)
    import tyro  # late: other commands do without it

    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_words_rule)
    return tyro.cli(
        type(default),
        prog=prog,
        description=description,
        args=list(arguments),
        default=default,
        config=(tyro.conf.OmitArgPrefixes,),
        registry=registry,
    )


def field_types(config: Any) -> dict[str, Any]:
    """Flag name, without dashes in front, to type, for every field of a nested dataclass."""
    hints = get_type_hints(type(config))
    types: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        nested = dataclasses.is_dataclass(value)
        found = field_types(value) if nested else {_flag_name(field.name): hints[field.name]}
        assert not types.keys() & found.keys(), f"field names must be unique, got {found.keys()}"
        types.update(found)
    return types


def _check_names(arguments: Sequence[str], types: dict[str, Any], prog: str) -> None:
    switches = {f"no-{name}": bool for name, kind in types.items() if kind is bool}
    known = {"help": bool, **types, **switches}
    rest, taken = list(arguments), set[str]()
    while rest:
        typed, equals, value = rest.pop(0).partition("=")
        if typed == "-h":
            continue
        name = _flag_name(typed.removeprefix("--"))
        if not typed.startswith("--") or name not in known:
            what = "flag" if typed.startswith("-") else "argument"
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"; did you mean --{near[0]}?" if near else ""
            raise ValueError(
                f"{prog} has no {what} {typed}{hint} (`{prog} --help` lists the flags)"
            )
        kind = known[name]
        if kind is bool:
            if equals or (rest and rest[0].lower() in _TRUTH_VALUES):
                raise ValueError(
                    f"--{name} must stand alone, got the value {value or rest[0]}; use --{name} or "
                    f"--no-{name}"
                )
            continue
        if element := _element(kind):
            if name in taken:
                raise ValueError(
                    f"--{name} must be given once, got it again; put all words behind one --{name}"
                )
            taken.add(name)
            words = [value] if equals else _take_words(rest)
            for word in words:
                _parse_pairs(element, word, f"--{name}")
            continue
        if not equals and rest:
            value = rest.pop(0)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise unknown_choice(f"--{name}", value, get_args(kind))


def _take_words(rest: list[str]) -> list[str]:
    """Removes the words up to the next flag."""
    count = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    words, rest[:] = rest[:count], rest[count:]
    return words


def _element(kind: Any) -> type[Any] | None:
    """The dataclass of which `kind` is a tuple of any length; None for other types."""
    if get_origin(kind) is tuple and dataclasses.is_dataclass(get_args(kind)[0]):
        return get_args(kind)[0]
    return None


def _words_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Tells tyro how words of pairs become a tuple of dataclasses."""
    element = _element(info.type)
    if element is None:
        return None
    from tyro.constructors import PrimitiveConstructorSpec

    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="[KEY=VALUE,... ...]",
        instance_from_str=lambda words: tuple(
            _parse_pairs(element, word, element.__name__) for word in words
        ),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda values: [_format_pairs(value) for value in values],
    )


def _parse_pairs(kind: type[Any], word: str, where: str) -> Any:
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for pair in word.split(","):
        typed, equals, text = pair.partition("=")
        key = typed.replace("-", "_")
        if not equals or not text or key in values:
            wrong = f"{key} twice" if key in values else repr(pair)
            raise ValueError(
                f"{where}: each word must be KEY=VALUE,KEY=VALUE with every key once, got {wrong} "
                f"in {word!r}; the keys are {', '.join(hints)}"
            )
        values[key] = _from_text(alternatives(hints.get(key)), text)
    return decode(kind, values, where)


def _format_pairs(value: Any) -> str:
    """The word that `_parse_pairs` reads as `value`; what is None is left out."""
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return ",".join(f"{key}={held}" for key, held in fields.items() if held is not None)


def _from_text(kinds: tuple[Any, ...], text: str) -> Any:
    """The value of one of these types for which a text stands; else the text itself."""
    if bool in kinds and text in ("true", "false"):
        return text == "true"
    if int in kinds and re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    if float in kinds and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
        return float(text)
    return text


def _flag_name(field_name: str) -> str:
    return field_name.replace("_", "-")
