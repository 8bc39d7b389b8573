"""The pages of what the TPU compiler says, with the compiler's answer given."""

import dataclasses
import json

import pytest

from farspan.plan import aot
from farspan.plan.hlo import KernelLaunches, Overlap

GIB = 2**30
FITS = aot.CompileReport(
    "p:f", "v5p:4x4x4", 64, 95 * GIB, (), {"libtpu": "1.2"}, 2.0, 30.0,
    aot.Memory(3 * GIB, 2 * GIB, 2 * GIB, 5 * GIB, 0, 8 * GIB, 0, 0, 0, 4 * GIB), None,
    (Overlap("collective-permute", 10, 8, 0, GIB, GIB, GIB // 2, 0),),
    (KernelLaunches("splash", 2, 2, 16),),
)  # fmt: skip
LACK = aot.OutOfMemory(120 * GIB, 95 * GIB, (aot.Buffer(60 * GIB, "f32[9]", "dot"),), "words")
FULL = dataclasses.replace(FITS, memory=None, out_of_memory=LACK, collectives=(), kernels=())


@pytest.fixture
def report(importable, monkeypatch, tmp_path, capsys):
    """Writes the page of one case from a compiler's answer; returns (status, page, JSON)."""
    del importable
    import aot_report

    def write(answer):
        monkeypatch.setattr(aot_report, "compile_step", lambda *_: answer)
        command = ["--cases", "llama3_8b_long-v5p", "--out", str(tmp_path), "--json"]
        status = aot_report.main(command)
        page = (tmp_path / "llama3_8b_long-v5p.md").read_text()
        return status, page, json.loads(capsys.readouterr().out.splitlines()[-1])

    return write


def test_a_step_that_fits(report):
    status, page, found = report(FITS)
    assert status == 0
    assert {"commit", "versions", "date", "rows"} <= found.keys()
    assert found["rows"][0]["fits"]
    assert "**fits, 8.00 GiB of 95.00 GiB a device**" in page
    assert "| collective-permute | 10 | 8 | 1.00 GiB | 512.00 MiB |" in page
    assert "| splash | 2 | 16 |" in page
    assert "nothing was run" in page
    assert f"{found['date']}, commit {found['commit']}; compiled by libtpu 1.2" in page


def test_a_step_that_does_not(report):
    status, page, _ = report(FULL)
    assert status == 1
    assert "out of memory, needs 120.00 GiB of 95.00 GiB" in page
    assert "| f32[9] | 60.00 GiB | dot |" in page


def test_every_case_can_be_planned(importable):
    del importable
    import aot_report

    from farspan.cli.plan import make_plan, parse_recipe

    for case in aot_report.CASES.values():
        _, options = parse_recipe(case.recipe, case.flags)
        plan = make_plan(case.recipe, options)
        assert plan.hardware.num_chips == 64
        assert plan.work.num_devices == plan.hardware.num_devices
