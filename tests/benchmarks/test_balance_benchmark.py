"""The benchmark of the layouts' balance, on short rows."""

import json

ROW_KEYS = {"layout", "law", "cp", "max_over_mean", "bytes_received_per_device"}
LAWS = {"one_document", "lognormal", "short_and_long", "sliding_window", "prefix_lm"}
LAYOUTS = ["contiguous", "zigzag", "striped", "balanced"]


def test_balanced_is_balanced_on_every_law_and_receives_no_more(run_benchmark):
    done = run_benchmark("balance.py", "--cp", "8", "16", "--tokens-per-device", "512", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {"rows", "versions", "commit"} <= report.keys()
    rows = report["rows"]
    assert len(rows) == len(LAWS) * len(LAYOUTS) * 2
    assert {row["law"] for row in rows} == LAWS
    assert [row["layout"] for row in rows[:4]] == LAYOUTS
    assert all(row.keys() >= ROW_KEYS for row in rows)
    assert max(row["max_over_mean"] for row in rows if row["layout"] == "balanced") <= 1.02
    assert report["is_balanced"]
    assert report["receives_least"]
    # Every key of the others arrives: 7 shards of 512 tokens, of 2 * 8 * 128 bfloat16 each.
    known = [row for row in rows if (row["law"], row["cp"]) == ("one_document", 8)]
    assert {row["bytes_received_per_device"] for row in known} == {7 * 512 * 2 * 8 * 128 * 2}


def test_a_length_that_the_laws_cannot_divide_is_refused(run_benchmark):
    done = run_benchmark("balance.py", "--tokens-per-device", "100")
    assert done.returncode == 2
    assert "multiple of 16" in done.stderr
