"""Jinja as chat templates expect it, in a sandbox."""

import datetime
import json
from typing import Any, NoReturn

from farspan.data.optional import require
from farspan.data.tokens.marks import SCORED_END, SCORED_START

# Templates that ask for the day get the one that Llama's write without a clock: the same data make
# the same tokens on every day.
_TODAY = datetime.date(2024, 7, 26)


def compile_template(source: str) -> Any:
    """Compiles a chat template.

    `{% generation %}` and `{% endgeneration %}` put `SCORED_START` and `SCORED_END` around what is
    between them. Templates may use `raise_exception`, `strftime_now` (of one fixed day), `break`
    and `continue`, and the filter `tojson`, which leaves `<` and `é` as they are.

    Args:
      source: The template.

    Returns:
      A `jinja2.Template`, which can neither change its arguments nor reach what lies behind them.

    Raises:
      ModuleNotFoundError: The package `jinja2` is not installed.
      ValueError: The template is invalid.
    """
    jinja2 = require("jinja2", "a chat template")
    sandbox = require("jinja2.sandbox", "a chat template")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_extension(), "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"chat template: line {error.lineno} must be valid Jinja, got {error.message}; "
            f"correct the template, or set chat_template to another"
        ) from error


def _generation_extension() -> type[Any]:
    nodes = require("jinja2.nodes", "a chat template")
    ext = require("jinja2.ext", "a chat template")

    class Generation(ext.Extension):
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_scored"), [], [], body).set_lineno(line)

        def _scored(self, caller: Any) -> str:
            return f"{SCORED_START}{caller()}{SCORED_END}"

    return Generation


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise ValueError(message)
