"""The benchmark of hidden transfers, on four chips and short rows."""

import json

import pytest

from farspan.plan.aot import compiler_available

pytestmark = pytest.mark.skipif(
    not compiler_available(), reason="needs libtpu: pip install 'farspan[tpu]'"
)
SMALL = ("--heads", "4", "--kv-heads", "2", "--seq-len", "1024", "--hardware", "v5p:2x2x1")


def test_a_ring_is_hidden_in_forward_and_a_gather_at_once_cannot_be(
    run_benchmark, tmp_path, monkeypatch
):
    monkeypatch.setenv("FARSPAN_CACHE_DIR", str(tmp_path))
    done = run_benchmark(
        "overlap.py",
        "--strategies",
        "ring",
        "all_gather",
        "--directions",
        "forward",
        "--json",
        *SMALL,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {"rows", "commit", "versions", "all_hidden"} <= report.keys()
    assert "libtpu" in report["versions"]
    ring, gather = report["rows"]
    assert (ring["strategy"], ring["direction"]) == ("ring", "forward")
    # Keys and values, 256 tokens of 2 heads of 128 in bfloat16, go to three others.
    assert ring["transfers"] == ring["hideable_transfers"] == ring["hidden_transfers"] == 6
    assert ring["bytes"] == ring["hidden_bytes"] == 6 * 256 * 2 * 128 * 2
    assert ring["kernel_launches"] == 4
    assert ring["stacked_bytes"] < 256 * 2 * 128 * 2, "no buffer holds a part for each device"
    assert gather["transfers"] == 2
    assert gather["hideable_transfers"] == gather["hidden_transfers"] == 0
    assert gather["kernel_launches"] == 1
    assert "ring forward: compiling" in done.stderr


@pytest.mark.usefixtures("importable")
def test_backward_alone_recomputes_nothing_and_what_is_not_hidden_fails_the_run(
    monkeypatch, capsys, tmp_path
):
    import overlap

    monkeypatch.setenv("FARSPAN_CACHE_DIR", str(tmp_path))
    arguments = ["--strategies", "ring", "--directions", "backward", "--json", *SMALL]
    status = overlap.main(arguments)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = report["rows"]
    assert row["kernel_launches"] == 4
    assert row["collectives"].keys() == {"collective-permute"}
    # Gradients of the last step go home behind the last kernel.
    assert 0 < row["hideable_transfers"] < row["transfers"]
    assert row["hidden_transfers"] <= row["hideable_transfers"]
    all_hidden = row["hidden_transfers"] == row["hideable_transfers"]
    assert report["all_hidden"] == all_hidden
    assert status == (0 if all_hidden else 1)

    counts = overlap._counts
    monkeypatch.setattr(overlap, "_counts", lambda *a: counts(*a) | {"hidden_transfers": 0})
    assert overlap.main(arguments) == 1
    assert "could be hidden is: NO" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [("--hardware", "v5q:2x2x1"), ("--seq-len", "1001")])
def test_what_does_not_fit_is_refused(run_benchmark, wrong):
    done = run_benchmark("overlap.py", *wrong)
    assert done.returncode == 2
    assert "error" in done.stderr
