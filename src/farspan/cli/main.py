"""Entry point of `farspan`: finds the command and reports errors without a traceback."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Sequence

from farspan.errors import unknown_choice
from farspan.platform import skip_absent_tpu

COMMANDS = {
    "train": "Train a language model from a recipe.",
    "launch": "Run a command in several processes of this machine, and start them again.",
    "data": "Tokenise a run's data ahead, and say how it packs.",
    "plan": "Say what a training step costs on given TPUs, and whether it fits; needs no devices.",
    "verify": "Check on your own devices that split training is exact.",
    "show": "Draw a mask, a layout or a schedule; needs no devices.",
}

_EXTRA_OF = {  # the extra that brings a module
    **dict.fromkeys(("grain", "optax", "orbax", "rich", "tensorboardX", "tyro"), "train"),
    **dict.fromkeys(
        ("fsspec", "jinja2", "pyarrow", "sentencepiece", "tokenizers", "zstandard"), "data"
    ),
    "matplotlib": "show",
}
_USAGE_ERROR, _FAILURE, _INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    A mistake in the arguments, configuration or data prints `error: ...` and returns 2; a run that
    fails returns 1. `--debug`, or FARSPAN_DEBUG=1 in the environment, adds the traceback.

    Args:
      argv: Arguments after the program's name; those of the process by default.

    Returns:
      The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or os.environ.get("FARSPAN_DEBUG", "0") not in ("", "0")
    arguments = [argument for argument in arguments if argument != "--debug"]
    skip_absent_tpu()
    status = _guarded(arguments, debug=debug)
    if "farspan.dist.processes" in sys.modules:  # this may be one process of several
        from farspan.dist.processes import leave

        leave(status)
    return status


def _guarded(arguments: list[str], *, debug: bool) -> int:
    """Runs a command and turns what it raises into a message and a status."""
    try:
        return _dispatch(arguments)
    except SystemExit as stop:  # tyro, after it printed help or an error
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA_OF:
            raise
        extra = _EXTRA_OF[error.name]
        sys.stderr.write(
            f"error: this command needs {error.name}; pip install 'farspan[{extra}]'\n"
        )
        return _FAILURE
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        if isinstance(error, RuntimeError) and not isinstance(error, _expected_failures()):
            raise
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"error: {error}\n")
        return _USAGE_ERROR if isinstance(error, (ValueError, FileNotFoundError)) else _FAILURE


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if arguments[0] == "--version":
        sys.stdout.write(f"farspan {importlib.metadata.version('farspan')}\n")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        raise unknown_choice("command", command, COMMANDS)
    return importlib.import_module(f"farspan.cli.{command}").main(rest)


def _expected_failures() -> tuple[type[RuntimeError], ...]:
    """Errors at run time that are worth a sentence and no traceback."""
    from farspan.dist.processes import PeerLost
    from farspan.plan.compiler import CompileError

    return NotImplementedError, CompileError, PeerLost


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: farspan COMMAND [arguments] [--debug]\n\n"
        "Exact context-parallel training of language models in JAX.\n\n"
        f"commands:\n{commands}\n\n"
        "`farspan COMMAND --help` lists the arguments of a command; --debug adds the traceback to "
        "an error.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
