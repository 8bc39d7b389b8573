"""The loop: it ends where an unbroken run would, whatever stops it on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from farspan.recipes import get_recipe
from farspan.train import loop, session
from farspan.train.checkpoint import Checkpoints
from farspan.train.config import Stage, TrainConfig
from farspan.train.metrics import read_metrics

Hook = Callable[[int], None]


@pytest.fixture
def config(tmp_path: Path, change: Callable[..., TrainConfig]) -> TrainConfig:
    """Six steps of two rows of 64 tokens from a small file, on four devices."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}.\n" for i in range(400)))
    return change(
        get_recipe("quickstart").build(),
        data=str(text),
        seq_len=64,
        batch_size=2,
        steps=6,
        context_parallel_size=4,
        checkpoint_every=2,
        keep_checkpoints=10,
        log_every=2,
        learning_rate=0.1,
        warmup_steps=2,
        run_dir=str(tmp_path / "run"),
    )


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, fake_setup: type[Any]) -> Callable[..., loop.RunResult]:
    """Runs the loop on the small set-up; `before_step(step)` is called with the step, from 1."""

    def run(
        config: TrainConfig, before_step: Hook | None = None, poison: int | None = None
    ) -> loop.RunResult:
        class Setup(fake_setup):
            def step(self, state: Any, device_batch: Any) -> Any:
                number = int(state.step) + 1
                if before_step:
                    before_step(number)
                state, metrics = super().step(state, device_batch)
                if number == poison:
                    metrics |= {"loss": jnp.nan, "finite": 0}
                return state, metrics

        monkeypatch.setattr(loop, "build_setup", Setup)
        return loop.run(config)

    return run


def crash_at(number: int) -> Hook:
    def hook(step: int) -> None:
        if step == number:
            raise KeyError("a crash")

    return hook


def signal_at(number: int, which: signal.Signals) -> Hook:
    def hook(step: int) -> None:
        if step == number:
            os.kill(os.getpid(), which)

    return hook


def losses(config: TrainConfig) -> dict[int, float]:
    records = read_metrics(Path(config.run_dir) / "metrics.jsonl")
    assert len({r["step"] for r in records}) == len(records)
    return {r["step"]: r["loss"] for r in records}


def final_state(config: TrainConfig, fake_setup: type[Any]) -> Any:
    with Checkpoints(Path(config.run_dir), keep=10) as checkpoints:
        step = checkpoints.newest()
        assert step is not None
        return checkpoints.restore(step, fake_setup(config).abstract_state())


def assert_same(a: Any, b: Any) -> None:
    (state_a, loader_a), (state_b, loader_b) = a, b
    jax.tree.map(np.testing.assert_array_equal, state_a, state_b)
    assert loader_a == loader_b


def elsewhere(config: TrainConfig, name: str) -> TrainConfig:
    return dataclasses.replace(config, run_dir=str(Path(config.run_dir).with_name(name)))


def test_a_run_learns_and_writes_what_it_promises(
    config: TrainConfig, train: Callable[..., loop.RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(config)
    assert (result.steps, result.stopped_by, result.final_loss_steps) == (6, None, 6)
    assert result.final_loss == pytest.approx(np.mean(list(losses(config).values())))
    assert losses(config)[6] < losses(config)[1]
    assert 1 < result.unigram_loss < 3
    run_dir = Path(config.run_dir)
    assert result.metrics == run_dir / "metrics.jsonl"
    assert result.checkpoint == run_dir / "checkpoints" / "6"
    assert json.loads((run_dir / "config.json").read_text())["data"]["seq_len"] == 64
    (launch,) = [json.loads(line) for line in (run_dir / "launches.jsonl").read_text().splitlines()]
    assert launch["versions"]["jax"] == jax.__version__
    assert launch["start_step"] == 0
    printed = capsys.readouterr().out
    assert "loading data" in printed
    assert [s for s in range(1, 7) if f"step {s}/6 " in printed] == [1, 2, 4, 6]


def test_a_second_launch_is_refused_and_does_not_touch_the_first(
    config: TrainConfig, train: Callable[..., loop.RunResult], fake_setup: type[Any]
) -> None:
    unbroken = elsewhere(config, "unbroken")
    train(unbroken)

    def launch_again(step: int) -> None:
        if step == 4:
            with pytest.raises(ValueError, match="one launch at a time may use"):
                loop.run(config)

    train(config, launch_again)
    assert losses(config) == losses(unbroken)
    assert_same(final_state(config, fake_setup), final_state(unbroken, fake_setup))
    assert len((Path(config.run_dir) / "launches.jsonl").read_text().splitlines()) == 1


def test_records_count_the_global_batch_once(
    config: TrainConfig, train: Callable[..., loop.RunResult], change: Callable[..., TrainConfig]
) -> None:
    counted = []
    for size in (1, 4):
        changed = elsewhere(change(config, context_parallel_size=size, steps=2), f"cp{size}")
        train(changed)
        counted.append(
            [
                (r["tokens"], r["loss"])
                for r in read_metrics(Path(changed.run_dir) / "metrics.jsonl")
            ]
        )
    (first, _), *_ = counted[0]
    assert 0 < first <= 128
    np.testing.assert_allclose(counted[0], counted[1], rtol=1e-6)


@pytest.mark.smoke
def test_after_a_crash_the_run_ends_bit_for_bit_where_an_unbroken_one_does(
    config: TrainConfig,
    train: Callable[..., loop.RunResult],
    fake_setup: type[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    unbroken = elsewhere(config, "unbroken")
    train(unbroken)
    with pytest.raises(KeyError, match="a crash"):
        train(config, crash_at(4))
    assert sorted(losses(config)) == [1, 2, 3]
    capsys.readouterr()
    assert train(config).steps == 6
    assert "resuming from step 2" in capsys.readouterr().out
    assert losses(config) == losses(unbroken)
    assert_same(final_state(config, fake_setup), final_state(unbroken, fake_setup))


def test_a_resumed_run_may_use_other_devices(
    config: TrainConfig,
    train: Callable[..., loop.RunResult],
    change: Callable[..., TrainConfig],
    fake_setup: type[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyError):
        train(config, crash_at(3))
    moved = change(config, context_parallel_size=8)
    train(moved)
    assert "changed since then: context_parallel_size: 4 -> 8" in capsys.readouterr().out
    state, _ = final_state(moved, fake_setup)
    assert state.params["logits"].sharding.num_devices == 8
    assert sorted(losses(moved)) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step_and_the_run_can_go_on(
    config: TrainConfig,
    train: Callable[..., loop.RunResult],
    fake_setup: type[Any],
    capsys: pytest.CaptureFixture[str],
    which: signal.Signals,
) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stopped = train(config, signal_at(3, which))
    assert (stopped.steps, stopped.stopped_by) == (3, which)
    assert stopped.checkpoint == Path(config.run_dir) / "checkpoints" / "3"
    assert f"{which.name}: stopping after step 3 of 6" in capsys.readouterr().out
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    train(config)
    unbroken = elsewhere(config, "unbroken")
    train(unbroken)
    assert_same(final_state(config, fake_setup), final_state(unbroken, fake_setup))


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(
    config: TrainConfig, train: Callable[..., loop.RunResult]
) -> None:
    with pytest.raises(FloatingPointError, match=r"loss=nan.* at step 4 .*checkpoint of step 2"):
        train(config, poison=4)
    with Checkpoints(Path(config.run_dir), keep=10) as checkpoints:
        assert checkpoints.newest() == 2
    assert sorted(losses(config)) == [1, 2, 3]
    assert (Path(config.run_dir) / "non_finite" / "step-00000004.npz").exists()


def test_such_a_step_is_skipped_on_request(
    config: TrainConfig, train: Callable[..., loop.RunResult], change: Callable[..., TrainConfig]
) -> None:
    result = train(change(config, non_finite="skip"), poison=4)
    assert (result.steps, result.skipped, result.final_loss_steps) == (6, 1, 5)
    assert losses(config)[4] is None
    assert (Path(config.run_dir) / "non_finite" / "step-00000004.npz").exists()


def test_held_out_rows_are_evaluated_when_due_and_at_the_end(
    config: TrainConfig, train: Callable[..., loop.RunResult], change: Callable[..., TrainConfig]
) -> None:
    config = change(config, eval_every=4, eval_rows=3, ema_decay=0.5)
    result = train(config)
    records = read_metrics(Path(config.run_dir) / "eval.jsonl")
    assert [record["step"] for record in records] == [4, 6]
    assert {record["eval_tokens"] for record in records} == {3 * 64}
    assert records[1]["eval_loss"] < records[0]["eval_loss"]
    assert records[1]["eval_loss_ema"] > records[1]["eval_loss"]  # it lags
    assert result.evaluation is not None
    assert result.evaluation.eval_loss == records[1]["eval_loss"]


@pytest.mark.parametrize("crash", [3, 4, 6])
def test_stages_change_rows_and_devices_and_resume_wherever_they_are_cut(
    config: TrainConfig,
    train: Callable[..., loop.RunResult],
    change: Callable[..., TrainConfig],
    fake_setup: type[Any],
    capsys: pytest.CaptureFixture[str],
    crash: int,
) -> None:
    stages = (
        Stage(3, seq_len=128, batch_size=1, context_parallel_size=8),
        Stage(5, seq_len=32, batch_size=4),
    )
    config = change(config, stages=stages)
    unbroken = elsewhere(config, "unbroken")
    train(unbroken)
    assert "stage 1 of 2: steps 4 to 5, rows of 128 tokens" in capsys.readouterr().out
    rows = [r["seq_len"] for r in read_metrics(Path(unbroken.run_dir) / "metrics.jsonl")]
    assert rows == [64, 64, 64, 128, 128, 32]
    with pytest.raises(KeyError, match="a crash"):
        train(config, crash_at(crash))
    assert train(config).steps == 6
    assert losses(config) == losses(unbroken)
    assert_same(final_state(config, fake_setup), final_state(unbroken, fake_setup))


def test_a_stream_goes_on_bit_for_bit(
    config: TrainConfig,
    train: Callable[..., loop.RunResult],
    change: Callable[..., TrainConfig],
    fake_setup: type[Any],
) -> None:
    config = change(config, streaming=True, shuffle_window_rows=3)
    unbroken = elsewhere(config, "unbroken")
    assert train(unbroken).unigram_loss is None
    with pytest.raises(KeyError, match="a crash"):
        train(config, crash_at(4))
    train(config)
    assert losses(config) == losses(unbroken)
    assert_same(final_state(config, fake_setup), final_state(unbroken, fake_setup))


def test_a_signal_in_another_process_stops_this_one(
    config: TrainConfig,
    train: Callable[..., loop.RunResult],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(session, "any_process", lambda _: next(answers))
    stopped = train(config)
    assert (stopped.steps, stopped.stopped_by) == (1, signal.SIGTERM)
    assert "another process was asked to stop: stopping after step 1" in capsys.readouterr().out
    assert stopped.checkpoint == Path(config.run_dir) / "checkpoints" / "1"


def test_a_finished_run_says_so_and_changes_nothing(
    config: TrainConfig,
    train: Callable[..., loop.RunResult],
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(config)
    before = losses(config)
    result = train(config)
    assert (result.steps, result.final_loss) == (6, None)
    assert "nothing to do: 6 steps are done" in capsys.readouterr().out
    assert losses(config) == before


def test_a_resume_with_another_seed_is_refused_before_data_is_read(
    config: TrainConfig,
    train: Callable[..., loop.RunResult],
    change: Callable[..., TrainConfig],
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(config)
    capsys.readouterr()
    with pytest.raises(ValueError, match=r"resume: .*seed: 0 then, 1 now"):
        train(change(config, seed=1))
    assert "loading data" not in capsys.readouterr().out


def test_a_vocabulary_that_does_not_cover_the_tokenizer_is_refused(
    config: TrainConfig, train: Callable[..., loop.RunResult], change: Callable[..., TrainConfig]
) -> None:
    with pytest.raises(ValueError, match=r"vocab_size=257.*use --vocab-size 258"):
        train(change(config, vocab_size=257))
    assert not (Path(config.run_dir) / "config.json").exists()


def test_an_unknown_kernel_is_refused_before_anything_is_built(
    config: TrainConfig, train: Callable[..., loop.RunResult], change: Callable[..., TrainConfig]
) -> None:
    with pytest.raises(ValueError, match=r'kernel must be one of .*did you mean "xla"'):
        train(change(config, kernel="xlaa"))
    assert not Path(config.run_dir).exists()


def test_an_error_in_the_feed_reaches_the_caller(
    config: TrainConfig,
    train: Callable[..., loop.RunResult],
    fake_setup: type[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("cannot place this batch")

    monkeypatch.setattr(fake_setup, "place", fail)
    with pytest.raises(ValueError, match="cannot place this batch"):
        train(config)


def test_a_process_of_its_own_makes_the_devices() -> None:
    """Where a program calls `run`, nothing before it has started JAX."""
    code = (
        "import jax; from farspan.recipes import get_recipe; from farspan.train import loop\n"
        "loop.build_setup = lambda config: exit(f'{jax.device_count()} devices')\n"
        "loop.run(get_recipe('quickstart').build())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "8 devices\n"
