"""The benchmark of what attention sends, on short rows."""

import json

import pytest

ROW_KEYS = {
    "model", "layer", "strategy", "direction", "formula_bytes", "hlo_bytes", "equal", "sent_bytes",
    "sent_bytes_bfloat16", "held_key_bytes", "temp_bytes",
}  # fmt: skip


def test_formulas_equal_the_programs_and_a_refusal_is_reported(run_benchmark):
    done = run_benchmark(
        "communication.py", "--models", "llama-3.1-8b",
        "--strategies", "ring", "all_gather", "halo", "--seq-len", "1024", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {"rows", "commit", "versions", "all_equal", "refused"} <= report.keys()
    assert report["all_equal"]
    measured = [(row["strategy"], row["direction"]) for row in report["rows"]]
    assert measured == [
        (strategy, direction)
        for strategy in ("ring", "all_gather")
        for direction in ("forward", "backward")
    ]
    for row in report["rows"]:
        assert row.keys() >= ROW_KEYS
        assert row["equal"]
        assert (row["model"], row["layer"]) == ("llama-3.1-8b", "global")
        assert row["formula_bytes"] == row["hlo_bytes"] > 0
        assert row["temp_bytes"] > 0
    # Keys, values and segment ids of 128 tokens go past the 7 other devices.
    forward = report["rows"][0]
    assert forward["sent_bytes"] == 7 * 128 * (2 * 8 * 128 * 4 + 4)
    assert forward["sent_bytes_bfloat16"] == 7 * 128 * (2 * 8 * 128 * 2 + 4)
    (refused,) = report["refused"]
    assert refused["strategy"] == "halo"
    assert refused["reason"] in done.stdout
    assert "all_gather" in done.stderr


@pytest.mark.usefixtures("importable")
def test_a_formula_that_differs_fails_the_run(monkeypatch, capsys):
    import communication

    monkeypatch.setattr(communication, "expected_collectives", lambda *_: {})
    arguments = ["--models", "llama-3.1-8b", "--strategies", "all_gather", "--seq-len", "64"]
    assert communication.main([*arguments, "--json"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert not json.loads(lines[-1])["all_equal"]
    assert any("but formula 0 of 0 B" in line for line in lines)


def test_a_length_that_zigzag_cannot_cut_is_refused(run_benchmark):
    done = run_benchmark("communication.py", "--seq-len", "100")
    assert done.returncode == 2
    assert "multiple of 2 * cp" in done.stderr
