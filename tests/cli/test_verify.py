"""`farspan verify`: it passes where split training is exact, and names what is not."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import pytest

from farspan.cli.main import main
from farspan.context import parallel
from farspan.context.ring import Ring
from farspan.testing import Parity, verification
from farspan.testing.verification import Check, Phase
from farspan.train.config import TrainConfig

TINY = (
    *("--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "8", "--model-dim", "16"),
    *("--ffn-dim", "32", "--vocab-size", "32", "--num-layers", "3", "--layers", "1"),
    *("--seq-len", "64", "--context-parallel-size", "4", "--kernel", "reference"),
)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Replaces the checks; the list receives the configurations that would have been checked."""
    configs: list[TrainConfig] = []

    def verify(runs: Sequence[TrainConfig], _: Phase) -> Iterator[list[Check]]:
        configs.extend(runs)
        for _ in runs:
            yield [
                Check("attention, packed", Parity("dq", 3e-7, 1e-5)),
                Check("model, float32", Parity("loss", float("nan"), 1e-5)),
            ]

    monkeypatch.setattr(verification, "verify", verify)
    return configs


@pytest.mark.smoke
def test_usp_passes_and_says_what_was_checked(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--strategy", "usp", "--context-parallel-ulysses-size", "2")
    assert main(["verify", *TINY, *flags]) == 0
    printed = capsys.readouterr().out

    for row in (
        r"1 of 3 layers, 32 of 32 vocabulary rows \(.*\), 3 packed rows of 64 tokens",
        r"attention, packed +dk +\S+ +1.0e-05 +yes",
        r"attention, unpacked +out \(plain\) +\S+ +1.0e-05 +yes",
        r"model, float32 +gradient of layers.key +\S+ +2.0e-05 +yes",
        r"model, float32 +losses of 5 steps +\S+ +1.0e-04 +yes",
        r"repeated, float32 +differing arrays of the state +0 +0 +yes",
    ):
        assert re.search(row, printed), row
    last = printed.splitlines()[-1]
    assert last == (
        "verify: 30 of 30 checks passed on 4 cpu devices "
        "(strategy usp = ring 2 x ulysses 2, zigzag)"
    )


@pytest.mark.slow
def test_a_recipe_in_bfloat16_is_checked_in_float32_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--context-parallel-strategy=ring", "--dtype", "bfloat16", "--json")
    assert main(["verify", "quickstart", *TINY, *flags]) == 0
    report = json.loads(capsys.readouterr().out)

    assert (report["passed"], report["total"], report["devices"]) == (46, 46, 4)
    assert {row["strategy"] for row in report["rows"]} == {"ring"}
    assert {row["check"] for row in report["rows"]} == {
        *("attention, packed", "attention, unpacked", "model, float32", "model, bfloat16"),
        *("repeated, float32", "repeated, bfloat16"),
    }


def test_a_broken_strategy_exits_1_and_names_the_quantities(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class BrokenRing(Ring):
        """Gradients of keys are off by a thousandth."""

        def backward(self, *arguments: Any) -> Any:
            found = super().backward(*arguments)
            dkey, dvalue = found.keys
            return dataclasses.replace(found, keys=(dkey * 1.001, dvalue))

    monkeypatch.setattr(parallel, "Ring", BrokenRing)
    jax.clear_caches()  # of what was traced with the real strategy
    status = main(["verify", *TINY, "--strategy", "ring", "--json"])
    jax.clear_caches()
    assert status == 1
    report = json.loads(capsys.readouterr().out)

    failed = {(row["check"], row["quantity"]) for row in report["rows"] if not row["ok"]}
    assert failed >= {
        ("attention, packed", "dk"),
        ("attention, unpacked", "dk"),
        ("model, float32", "gradient of layers.key"),
    }
    assert not {quantity for _, quantity in failed} & {"out", "lse", "dq", "dv", "loss"}
    assert report["passed"] == report["total"] - len(failed)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--strategy", "rign"], 'did you mean "ring"'),
        (["--strategy=al"], 'did you mean "all"'),
        (["quikstart"], 'did you mean "quickstart"'),
        (["--strateggy", "ring"], "did you mean --strategy"),
        (["--strategy", "ring", "--context_parallel_strategy=ring"], "got both; use one of them"),
        (["--context-parallel-size", "16"], "need 16 devices, but there are 8 \\(cpu\\)"),
        (["--context-parallel-size", "0"], "context_parallel_size must be at least 1, got 0"),
        (["--gradient-accumulation-steps", "0"], "gradient_accumulation_steps must be at least 1"),
        (["--layers", "0"], "layers must be at least 1, got 0; use --layers 1 or more"),
        (["--vocab", "1"], "vocab must be at least 2, got 1"),
        (["--seq-len", "1000000"], "oracle.* seq_len=1000000 .*need 298,.* GiB; use --seq-len "),
        (["--kernel", "xlaa"], 'did you mean "xla"'),
        (["--strategy", "ulysses", "--num-heads", "6"], "ulysses: .*degree of 1, 2, 3, 6"),
        (
            ["--strategy", "ring", "--context-parallel-ulysses-size", "2"],
            "belongs to strategy usp alone",
        ),
    ],
)
def test_a_mistake_exits_2_and_names_the_remedy(
    arguments: list[str],
    expected: str,
    verified: list[TrainConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    named = arguments[:1] == ["quikstart"]
    assert main(["verify", *arguments] if named else ["verify", *TINY, *arguments]) == 2
    assert re.search(expected, capsys.readouterr().err)
    assert not verified


def test_all_checks_what_the_heads_allow_and_says_what_it_refused(
    verified: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--strategy", "all", "--num-heads", "6", "--seq-len", "70")
    assert main(["verify", *TINY, *flags]) == 1
    printed = capsys.readouterr().out

    assert [run.parallel.context_parallel_strategy for run in verified] == [
        *("all_gather", "ring", "usp"),
    ]
    assert {run.data.seq_len for run in verified} == {72}
    assert "refused ulysses: ulysses: the query heads" in printed
    assert "failed usp: model, float32: loss" in printed
    assert re.search(r"model, float32 +loss +not finite +1.0e-05 +NO", printed)
    assert printed.splitlines()[-1] == (
        "verify: 3 of 6 checks passed on 4 cpu devices "
        "(strategies all_gather 4, ring 4, usp = ring 2 x ulysses 2, zigzag)"
    )

    assert main(["verify", *TINY, *flags, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert list(report["refused"]) == ["ulysses"]
    assert report["rows"][1] == {
        "check": "model, float32",
        "strategy": "all_gather",
        "quantity": "loss",
        "error": None,
        "tolerance": 1e-5,
        "ok": False,
    }


def test_replicas_and_accumulation_get_rows_of_their_own(
    verified: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (
        *("--strategy", "auto", "--context-parallel-size", "2", "--fsdp-parallel-size", "2"),
        *("--data-parallel-size", "2", "--gradient-accumulation-steps", "5", "--packing", "none"),
    )
    assert main(["verify", "llama3-8b-long", *TINY, *flags]) == 1
    (run,) = verified
    printed = capsys.readouterr().out

    assert (run.batch_size, run.gradient_accumulation_steps) == (8, 2)
    assert run.optimizer == dataclasses.replace(run.optimizer, warmup_steps=1)
    assert "8 rows of 64 tokens in 2 of 5 parts, bfloat16" in printed
    assert "on 8 cpu devices" in printed
    assert "data 2, fsdp 2, zigzag)" in printed


def test_help_is_quick_and_lists_recipes_and_flags() -> None:
    program = (
        "import sys\n"
        "from farspan.cli.main import main\n"
        "status = main(['verify', '--help'])\n"
        "heavy = {'jax', 'numpy', 'optax', 'grain', 'orbax', 'tensorstore'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for word in ("usage: farspan verify", "llama3_8b_long", "--strategy", "--num-heads", "--json"):
        assert word in done.stdout


def test_a_process_of_its_own_makes_the_devices() -> None:
    """As the README's command does, with the recipe's own kernel."""
    code = (
        "import jax; from farspan.cli import main, verify\n"
        "verify._run = lambda plan, scope, *, as_json: print(jax.device_count())\n"
        "main.main('verify quickstart --strategy all --context-parallel-size 8'.split())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "8"
