"""`farspan data`: counts that add up, and lengths that are all there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from farspan.cli.main import main


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Documents of 3, 40 and 700 bytes."""
    path = tmp_path / "corpus.jsonl"
    texts = ["abc", "x" * 40, "y" * 700]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str, str]:
    status = main(["data", "quickstart", *flags])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_counts_add_up_and_every_length_is_there(
    corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data", str(corpus), "--seq-len", "64"]
    status, out, _ = run(capsys, *flags, "--json")
    found = json.loads(out.splitlines()[-1])
    assert status == 0
    assert (found["documents"], found["tokens_in"], found["documents_split"]) == (3, 743, 1)
    assert found["tokens_packed"] == 743
    assert found["tokens_packed"] + found["tokens_padded"] == 64 * found["rows"]
    assert {
        row["from_tokens"]: row["documents"] for row in found["lengths"] if row["documents"]
    } == {
        2: 1,
        32: 1,
        512: 1,
    }
    assert sum(row["tokens"] for row in found["lengths"]) == 743
    status, out, _ = run(capsys, *flags)
    assert status == 0
    assert "3 documents, 743 tokens" in out
    assert "512 to 1,023" in out


def test_a_stage_has_its_own_rows(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(corpus), "--seq-len", "64", "--stages", "from_step=2,seq_len=32"]
    _, out, _ = run(capsys, *flags, "--stage", "1", "--json")
    found = json.loads(out.splitlines()[-1])
    assert found["tokens_packed"] + found["tokens_padded"] == 32 * found["rows"]
    status, _, err = run(capsys, *flags, "--stage", "2")
    assert (status, "stage must be from 0 to 1" in err) == (2, True)


def test_streams_are_refused(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "--data", str(corpus), "--streaming")
    assert status == 2
    assert "--no-streaming" in err
