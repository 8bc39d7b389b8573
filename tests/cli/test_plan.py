"""`farspan plan`: what it prints, what it refuses, and what it does with the compiler's answer."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from farspan.cli.main import main
from farspan.plan import aot
from farspan.plan.hlo import KernelLaunches, Overlap

GIB = 2**30


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_help_lists_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "\n  plan " in capsys.readouterr().out
    assert main(["plan", "--help"]) == 0
    assert "llama3_8b_long" in capsys.readouterr().out
    assert main(["plan", "quickstart", "--help"]) == 0
    assert "--hardware" in capsys.readouterr().out


def test_the_account_of_the_quick_start(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan_json(capsys, "quickstart")
    assert found["recipe"] == "quickstart"
    assert found["hardware"]["name"] == "v5p:2x2x2"
    assert found["mesh"]["cp_ring"] * found["mesh"]["cp_ulysses"] == found["num_devices"] == 8
    assert found["num_parameters"] == 1_443_584
    memory = found["memory"]
    assert memory["fits"]
    assert memory["state_fits"]
    assert memory["margin_bytes"] == found["hardware"]["hbm_bytes"] - memory["peak_bytes"]
    kinds = {item["kind"]: item for item in memory["items"]}
    assert kinds["parameters"]["exact"]
    assert (
        kinds["parameters"]["num_bytes"] + kinds["optimizer state"]["num_bytes"]
        == (memory["state_bytes"])
    )
    assert found["flops_per_device"]["hardware"] > found["flops_per_device"]["model"] > 0
    traffic = found["traffic_per_device"]
    sent = [each["sent_bytes"] for name in ("attention", "parameters", "gradients", "updates")
            for each in traffic[name]]  # fmt: skip
    assert sum(sent) == traffic["sent_bytes"]
    bounds = found["lower_bounds"]
    assert bounds["step_seconds"] == max(
        bounds["compute_seconds"], bounds["link_seconds"], bounds["hbm_seconds"]
    )
    assert found["compiled"] is None


def test_flags_change_the_account(capsys: pytest.CaptureFixture[str]) -> None:
    whole = plan_json(capsys, "quickstart", "--hardware", "v5p:4x4x4")
    assert whole["hardware"]["num_devices"] == 64
    packed = plan_json(capsys, "quickstart", "--document-tokens", "1024")
    assert packed["flops_per_device"]["attention_model"] < (
        whole["flops_per_device"]["attention_model"] / 6
    )
    assert packed["memory"] == whole["memory"]


def test_tables_say_that_it_fits_and_that_bounds_are_bounds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "quickstart"]) == 0
    printed = capsys.readouterr().out
    assert "fits by this estimate" in printed
    assert "Lower bounds of a step's time, not predictions" in printed
    assert "collective-permute" in printed


def test_what_does_not_fit_is_a_result_with_remedies(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "llama3_8b_long", "--hardware", "v5e", "--context-parallel-size", "1"]
    assert main([*command, "--fsdp-parallel-size", "8"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "does not fit by this estimate" in printed
    assert "optimizer state, 7.48 GiB: more devices" in printed
    assert main([*command, "--fsdp-parallel-size", "1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "parameters and optimizer state alone take 89.75 GiB of 15.75 GiB" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "plan needs the name of a recipe first"),
        (["quickstrat"], 'did you mean "quickstart"'),
        (["quickstart", "--hardware", "v5p:2x2x1"], "8 devices, got v5p:2x2x1 with 4; use --hard"),
        (["quickstart", "--hardware", "h100"], "chip must be one of"),
        (["quickstart", "--document-tokens", "-1"], "document_tokens must be at least 0"),
        (["quickstart", "--context-parallel-strategy", "ulysses"], "degree of 1, 2, 4"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["plan", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_the_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot, "compiler_available", lambda: False)
    assert main(["plan", "quickstart", "--compile"]) == 2
    caught = capsys.readouterr()
    assert "pip install 'farspan[tpu]'" in caught.err
    assert not caught.out


MEMORY = aot.Memory(3 * GIB, 2 * GIB, 2 * GIB, 5 * GIB, 0, 8 * GIB, 0, 0, 0, 4 * GIB)
REPORT = aot.CompileReport(
    "p:f", "v5p:2x2x2", 8, 95 * GIB, (), {"jax": "1"}, 2.0, 30.0, MEMORY, None,
    (Overlap("collective-permute", 10, 8, 0, GIB, GIB, GIB // 2, 0),),
    (KernelLaunches("splash", 2, 2, 16),),
)  # fmt: skip
FULL = aot.OutOfMemory(120 * GIB, 95 * GIB, (aot.Buffer(60 * GIB, "f32[9]", "dot"),), "words")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[aot.CompileReport]:
    """Reports that the compiler will give, last first."""
    reports: list[aot.CompileReport] = []

    def compile_program(
        program: str, arguments: dict[str, Any], hardware: str, **options: Any
    ) -> aot.CompileReport:
        assert program == "farspan.train.program:lower_train_step"
        assert json.loads(json.dumps(arguments)) == arguments
        assert hardware == "v5p:2x2x2"
        options["on_progress"]("compiling", 3.0)
        return reports.pop()

    monkeypatch.setattr(aot, "compile_program", compile_program)
    monkeypatch.setattr(aot, "compiler_available", lambda: True)
    return reports


def test_what_the_compiler_says(
    compiled: list[aot.CompileReport], capsys: pytest.CaptureFixture[str]
) -> None:
    compiled += [REPORT, REPORT]
    assert main(["plan", "quickstart", "--compile"]) == 0
    printed = capsys.readouterr().out
    assert "fits: 8.00 GiB of 95.00 GiB" in printed
    assert "4.00 GiB" in printed
    assert "512.00 MiB" in printed
    assert "splash" in printed
    found = plan_json(capsys, "quickstart", "--compile")["compiled"]
    assert found["fits"]
    assert found["collectives"][0]["hidden_transfers"] == 8


def test_out_of_memory_is_a_result(
    compiled: list[aot.CompileReport], capsys: pytest.CaptureFixture[str]
) -> None:
    compiled.append(dataclasses.replace(REPORT, memory=None, out_of_memory=FULL))
    assert main(["plan", "quickstart", "--compile"]) == 0
    printed = capsys.readouterr().out
    assert "out of memory: it needs 120.00 GiB of 95.00 GiB" in printed
    assert "f32[9]" in printed


def test_a_compiler_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        del arguments, options
        raise aot.CompileError("it did not compile")

    monkeypatch.setattr(aot, "compile_program", fail)
    monkeypatch.setattr(aot, "compiler_available", lambda: True)
    assert main(["plan", "quickstart", "--compile"]) == 1
    assert "error: it did not compile" in capsys.readouterr().err
