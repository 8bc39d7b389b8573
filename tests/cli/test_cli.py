"""The command line: help is quick, mistakes name the nearest right word, exit codes tell."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from farspan.cli import train as train_command
from farspan.cli.flags import parse_flags
from farspan.cli.main import main
from farspan.recipes import RECIPES
from farspan.train.config import TrainConfig
from farspan.train.loop import RunResult
from farspan.train.metrics import EvalRecord, read_metrics


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Replaces training; the list receives the configurations that would have been trained."""
    configs: list[TrainConfig] = []

    def run(config: TrainConfig, name: str) -> tuple[RunResult, bool]:
        configs.append(config)
        run_dir = Path(config.run_dir or f"runs/{name}-now")
        result = RunResult(
            run_dir=run_dir,
            steps=config.steps,
            final_loss=2.0,
            final_loss_steps=3,
            unigram_loss=3.25,
            evaluation=EvalRecord(config.steps, 2.5, 100, None, 1.0),
            skipped=1,
            metrics=run_dir / "metrics.jsonl",
            checkpoint=run_dir / "checkpoints" / str(config.steps),
            stopped_by=None,
        )
        return result, True

    monkeypatch.setattr(train_command, "_train", run)
    return configs


def parse(*arguments: str) -> TrainConfig:
    return parse_flags(
        RECIPES["quickstart"].build(), arguments, prog="farspan train x", description="d"
    )


def test_every_field_is_a_flag_that_sets_it() -> None:
    config = parse(
        *("--seq-len", "4096", "--num_layers=2", "--context-parallel-strategy", "ring"),
        *("--context_parallel_size", "4", "--packing", "none", "--learning-rate", "1e-3"),
        *("--data", "a b.txt", "--steps", "7", "--run-dir", "out", "--kernel", "xla"),
    )
    assert (config.data.seq_len, config.model.num_layers) == (4096, 2)
    assert config.parallel.context_parallel_strategy == "ring"
    assert config.parallel.context_parallel_size == 4
    assert config.data.packing == "none"
    assert config.optimizer.learning_rate == 1e-3
    assert (config.data.data, config.steps) == ("a b.txt", 7)
    assert (config.run_dir, config.kernel) == ("out", "xla")
    assert parse() == RECIPES["quickstart"].build()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], 'did you mean "train"'),
        (["train"], "one of quickstart"),
        (["train", "--steps", "3"], "recipe first.*got --steps"),
        (["train", "quikstart"], 'did you mean "quickstart"'),
        (["train", "quickstart", "--seq-lem", "5"], "did you mean --seq-len"),
        (["train", "quickstart", "--xyzzy"], "no flag --xyzzy"),
        (["train", "quickstart", "--context-parallel-strategy", "rign"], 'did you mean "ring"'),
        (["train", "quickstart", "--context-parallel-strategy=uly"], 'did you mean "ulysses"'),
        (["train", "quickstart", "--streaming", "false"], "use --streaming or --no-streaming"),
        (["train", "quickstart", "5"], "no argument 5"),
        (["train", "quickstart", "--seq-len", "many"], "--seq-len"),
        (["train", "quickstart", "--seq-len"], "--seq-len"),
        (["train", "quickstart", "--steps", "0"], "steps must be at least 1, got 0"),
    ],
)
def test_a_mistake_exits_2_names_the_remedy_and_shows_no_traceback(
    arguments: list[str],
    expected: str,
    trained: list[TrainConfig],
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments) == 2
    printed = capfd.readouterr()

    assert re.search(expected, printed.err, re.DOTALL), printed.err
    assert "Traceback" not in printed.err
    assert not trained


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("bad value"), 2),
        (FileNotFoundError("no such text"), 2),
        (NotImplementedError("not built"), 1),
        (FloatingPointError("loss is nan"), 1),
        (OSError("disk is full"), 1),
    ],
)
def test_errors_of_a_run_are_one_line_and_the_traceback_is_there_for_the_asking(
    error: Exception,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> RunResult:
        raise error

    monkeypatch.setattr(train_command, "_train", fail)
    monkeypatch.delenv("FARSPAN_DEBUG", raising=False)
    assert main(["train", "quickstart"]) == status
    assert capsys.readouterr().err == f"error: {error}\n"
    assert main(["train", "quickstart", "--debug"]) == status
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("FARSPAN_DEBUG", "1")
    assert main(["train", "quickstart"]) == status
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["optax", "not_ours"])
def test_a_missing_extra_is_named_and_other_modules_are_not_guessed_at(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> RunResult:
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(train_command, "_train", fail)
    if missing == "not_ours":
        with pytest.raises(ModuleNotFoundError):
            main(["train", "quickstart"])
    else:
        assert main(["train", "quickstart"]) == 1
        assert "pip install 'farspan[train]'" in capsys.readouterr().err


def test_an_unexpected_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> RunResult:
        raise KeyError("a bug")

    monkeypatch.setattr(train_command, "_train", fail)
    with pytest.raises(KeyError, match="a bug"):
        main(["train", "quickstart"])


def test_a_run_ends_with_its_loss_its_files_and_the_next_command(
    trained: list[TrainConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "quickstart", "--seed", "5", "--steps=9", "--log-every", "2"]) == 0
    (config,) = trained
    assert config.run_dir == ""
    printed = capsys.readouterr().out
    assert "done: step 9 of 9" in printed
    assert "2.0000 nats a token (mean of the last 3 steps)" in printed
    assert "3.2500" in printed
    assert "2.5000 nats a token, held out" in printed
    assert "skipped     1 steps" in printed
    assert "runs/quickstart-now/metrics.jsonl" in printed
    assert (
        "farspan train quickstart --seed 5 --log-every 2 --run-dir runs/quickstart-now --steps 18"
        in printed
    )


def test_a_stopped_run_exits_with_the_signals_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = RunResult(tmp_path, 4, 2.0, 4, 3.0, None, 0, tmp_path / "m", tmp_path / "c", 15)
    monkeypatch.setattr(train_command, "_train", lambda *_: (result, True))
    assert main(["train", "quickstart", "--run_dir", "old", "--steps", "9"]) == 143
    printed = capsys.readouterr().out
    assert "stopped: step 4 of 9" in printed
    assert f"farspan train quickstart --run-dir {tmp_path} --steps 9" in printed


@pytest.mark.smoke
def test_train_runs_from_the_command_line_to_the_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} and {i} make {2 * i}.\n" for i in range(200)))
    run_dir = tmp_path / "run"
    arguments = [
        *("train", "quickstart", "--data", str(text), "--run-dir", str(run_dir)),
        *("--seq-len", "128", "--num-layers", "1", "--model-dim", "16", "--ffn-dim", "16"),
        *("--head-dim", "4", "--steps", "2", "--warmup-steps", "0"),
    ]
    assert main(arguments) == 0
    first, second = read_metrics(run_dir / "metrics.jsonl")
    assert 5 < first["loss"] < 6
    assert second["loss"] < first["loss"]
    assert first["tokens"] in (127, 128)
    assert (run_dir / "checkpoints" / "2" / "state").is_dir()
    printed = capsys.readouterr().out
    assert "done: step 2 of 2" in printed
    assert f"all steps   █▁ {first['loss']:.4g} -> {second['loss']:.4g}" in printed


def test_help_of_a_recipe_shows_every_flag_with_the_recipes_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "quickstart", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    config: Any = RECIPES["quickstart"].build()
    for part in (config, config.model, config.data, config.parallel, config.optimizer):
        for field in dataclasses.fields(part):
            if not dataclasses.is_dataclass(getattr(part, field.name)):
                assert f"--{field.name.replace('_', '-')}" in text
    assert "--streaming, --no-streaming" in text
    assert "(default: 8192)" in text


@pytest.mark.smoke
@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["train", "quickstart", "--help"], []]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        "from farspan.cli.main import main\n"
        f"status = main({arguments!r})\n"
        "heavy = {'jax', 'numpy', 'optax', 'grain', 'orbax', 'tensorstore'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "usage: farspan" in done.stdout
