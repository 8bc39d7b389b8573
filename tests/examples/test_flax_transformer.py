"""The example with a stock Flax model: one argument splits the sequence and changes no number."""

import importlib.util
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "examples" / "flax_transformer.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("flax_transformer", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.smoke
def test_loss_and_gradients_are_those_of_one_device(example, capsys):
    example.main(["--seq-len", "64", "--steps", "3"])
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first == "64 tokens per row over 8 devices: usp = ring 4 x ulysses 2"
    rows = [[float(number) for number in line.split()] for line in lines]
    assert [row[0] for row in rows] == [0, 1, 2]
    for _, loss, split_loss, difference in rows:
        assert split_loss == pytest.approx(loss, abs=1e-5)
        assert 0 < difference < 1e-5
    assert rows[2][1] < rows[0][1]
