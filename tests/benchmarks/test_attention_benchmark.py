"""The attention benchmark: its reference, and a short run of ours."""

import json

import numpy as np
import pytest

import farspan
from farspan.testing.oracle import dense_attention_vjp

ROW_KEYS = {"implementation", "seq_len", "devices", "cpu_seconds", "peak_bytes", "error"}


@pytest.fixture
def problem_module(importable):  # noqa: ARG001
    from peers import problem

    return problem


@pytest.mark.parametrize("seq_len", [40, 300], ids=["one chunk", "two chunks"])
def test_the_chunked_reference_is_the_dense_oracle(problem_module, seq_len):
    problem = problem_module.Problem(seq_len, batch=2, num_heads=6, num_kv_heads=3, head_dim=8)
    inputs = problem.inputs()
    found = problem_module.reference(problem)
    oracle = dense_attention_vjp(*inputs, mask=farspan.Causal())
    expected = {"out": oracle.out, "dq": oracle.dquery, "dk": oracle.dkey, "dv": oracle.dvalue}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)


def test_a_quick_run_of_ours_is_exact_and_reports_every_key(run_benchmark):
    done = run_benchmark("attention.py", "--quick", "--only", "farspan", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {"rows", "versions", "commit"} <= report.keys()
    assert {"python", "jax", "numpy"} <= report["versions"].keys()
    measured = [(row["implementation"], row["devices"]) for row in report["rows"]]
    assert measured == [("farspan xla", 1), ("farspan ring", 2)]
    for row in report["rows"]:
        assert row.keys() >= ROW_KEYS
        assert row["seq_len"] == 512
        assert row["cpu_seconds"] > 0
        assert row["peak_bytes"] > 0
        assert row["error"] < 1e-5, row["errors"]


def test_an_implementation_that_fails_is_reported_and_ours_fails_the_run(run_benchmark):
    done = run_benchmark(
        "attention.py", "--quick", "--only", "farspan xla", "--num-heads", "3", "--json"
    )
    assert done.returncode == 1
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["rows"] == []
    assert "multiple of kv heads" in report["not_measured"][0]["reason"]


def test_an_interpreter_that_does_not_run_is_an_error(run_benchmark, tmp_path):
    done = run_benchmark("attention.py", "--quick", "--peer-python", str(tmp_path / "python"))
    assert done.returncode == 1
    assert "--peer-python must name a Python that runs" in done.stderr
