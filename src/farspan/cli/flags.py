"""Flags from the fields of nested dataclasses: `seq_len` becomes `--seq-len`."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from farspan.errors import unknown_choice

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
      ValueError: A flag, or the value of a flag with fixed choices, is unknown; the message names
        the nearest.
      SystemExit: After printing help (0), or an error in a value (2).
    """
    _check_names(arguments, field_types(default), prog)
    import tyro  # late: other commands do without it

    return tyro.cli(
        type(default),
        prog=prog,
        description=description,
        args=list(arguments),
        default=default,
        config=(tyro.conf.OmitArgPrefixes,),
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
    rest = list(arguments)
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
        if not equals and rest:
            value = rest.pop(0)
        if get_origin(kind) is Literal and value not in get_args(kind):
            raise unknown_choice(f"--{name}", value, get_args(kind))


def _flag_name(field_name: str) -> str:
    return field_name.replace("_", "-")
