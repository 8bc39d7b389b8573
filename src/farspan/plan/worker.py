"""The process that compiles: `python -m farspan.plan.worker`.

The first line of its standard input is a `Request` as JSON. It answers with lines of JSON on what
was its standard output; whatever libraries print there goes to standard error. It ends when its
standard input does, that is, with the process that started it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

MEMORY_FIELDS = {
    "argument_bytes": "argument_size_in_bytes",
    "output_bytes": "output_size_in_bytes",
    "alias_bytes": "alias_size_in_bytes",
    "temporary_bytes": "temp_size_in_bytes",
    "code_bytes": "generated_code_size_in_bytes",
    "peak_bytes": "peak_memory_in_bytes",
    "host_argument_bytes": "host_argument_size_in_bytes",
    "host_output_bytes": "host_output_size_in_bytes",
    "host_alias_bytes": "host_alias_size_in_bytes",
    "host_temporary_bytes": "host_temp_size_in_bytes",
}


class Request(TypedDict):
    """What is to be compiled, and the file for the text of the compiled program."""

    program: str
    arguments: dict[str, Any]
    topology: str
    topology_options: dict[str, Any]
    hlo_file: str


def main() -> None:
    """Compiles what standard input asks for."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    request: Request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer(**_compile(request, lambda phase: answer(phase=phase)))
    except Exception as error:
        import traceback

        traceback.print_exc()
        answer(error=str(error), type=type(error).__name__)
    os._exit(0)  # libtpu's own clean-up is slow, and expects a chip


def _compile(request: Request, report: Callable[[str], None]) -> dict[str, Any]:
    report("starting")
    import jax
    from jax.experimental import topologies

    jax.config.update("jax_platforms", "cpu")
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=request["topology"], **request["topology_options"]
    ).devices
    module, _, name = request["program"].partition(":")
    program = getattr(importlib.import_module(module), name)
    report("lowering")
    start = time.perf_counter()
    with jax.default_device(jax.devices("cpu")[0]):
        lowered: jax.stages.Lowered = program(devices, **request["arguments"])
    lowered_at = time.perf_counter()
    report("compiling")
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        seconds = {"lower_seconds": lowered_at - start}
        return {"failed": str(error), "compile_seconds": time.perf_counter() - lowered_at} | seconds
    done = time.perf_counter()
    text: Any = compiled.as_text()
    Path(request["hlo_file"]).write_text(text, encoding="utf-8")
    found: Any = compiled.memory_analysis()
    shardings: list[Any] = jax.tree.leaves(compiled.input_shardings)
    named = [each for each in shardings if isinstance(each, jax.sharding.NamedSharding)]
    ordered: Any = named[0].mesh.devices if named else None
    return {
        "chips": [list(device.coords) for device in ([] if ordered is None else ordered.flat)],
        "memory": {ours: getattr(found, theirs) for ours, theirs in MEMORY_FIELDS.items()},
        "lower_seconds": lowered_at - start,
        "compile_seconds": done - lowered_at,
    }


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
