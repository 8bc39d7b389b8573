"""`farspan show`: its numbers, its files, what it refuses, and terminals of every kind."""

import io
import json
import os
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest

import farspan.cli.drawing
from farspan import schedules
from farspan.cli.drawing.rows import make_row, parse_mask
from farspan.cli.main import main
from farspan.layouts import LAYOUTS
from farspan.masks import Causal, Chunked, PrefixLM, SlidingWindow, Tokens, visible, visible_pairs

WINDOW = "Causal() & SlidingWindow(100, 0)"
SMALL = ("--seq-len", "512")
SPLITS = {
    "all_gather": ("--cp-ring", "4"),
    "ulysses": ("--cp-ring", "1", "--cp-ulysses", "4"),
    "ring": ("--cp-ring", "2", "--cp-ring-outer", "2"),
    "usp": ("--cp-ring", "4", "--cp-ulysses", "2"),
    "halo": ("--cp-ring", "4", "--cp-ulysses", "2"),
}


def shown(capsys, *arguments):
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def numbers(capsys, *arguments):
    return json.loads(shown(capsys, *arguments, "--json").splitlines()[-1])


def test_the_mask_has_the_counts_of_the_dense_mask(capsys):
    lengths, seq_len = (30, 41, 9), 90
    found = numbers(
        capsys, *("mask", "--mask", "Causal() & SlidingWindow(left=12, right=0) | Chunked(16)"),
        *("--seq-len", "90", "--documents", "30,41,9", "--blocks", "12"),
    )  # fmt: skip
    ids = np.zeros((1, seq_len), np.int32)
    ids[0, :80] = np.repeat([1, 2, 3], lengths)
    tokens = Tokens(np.arange(seq_len, dtype=np.int32)[None], ids)
    mask = Causal() & SlidingWindow(12, 0) | Chunked(16)
    dense = np.asarray(visible(mask, tokens, tokens))[0]
    edges = np.arange(0, seq_len, 8)
    pairs = np.add.reduceat(np.add.reduceat(dense.astype(int), edges, 0), edges, 1)
    sizes = np.diff(edges, append=seq_len)
    full = int((pairs == np.outer(sizes, sizes)).sum())
    assert found["pairs"] == pairs.tolist()
    assert found["visible_pairs"] == int(dense.sum())
    empty = int((pairs == 0).sum())
    assert found["blocks"] == {"empty": empty, "partial": 144 - empty - full, "full": full}
    assert (found["documents"], found["padding"]) == ([30, 41, 9], 10)
    assert found["picture"] == "mask"


@pytest.mark.parametrize("picture", ["mask", "layout", "schedule"])
def test_a_picture_needs_no_flags_and_fits_100_columns(picture, capsys):
    text = shown(capsys, picture)
    assert len(text.splitlines()) > 10
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", schedules.STRATEGIES)
def test_every_strategy_and_layout_is_drawn_with_all_its_work(strategy, layout, capsys):
    flags = (*SMALL, "--mask", WINDOW, "--strategy", strategy, "--layout", layout)
    flags += SPLITS[strategy]
    if strategy == "halo" and layout in ("striped", "balanced"):
        assert main(["show", "schedule", *flags]) == 2
        assert "use layout contiguous or zigzag" in capsys.readouterr().err
        return
    row = make_row(WINDOW, 512, "mixed")
    total = visible_pairs(row.mask, 512, row.segment_ids)
    found = numbers(capsys, "schedule", *flags)
    assert sum(sum(step["pairs_per_head"]) for step in found["steps"]) == total
    heads = found["degrees"]["heads"]
    found = numbers(capsys, "layout", *flags)
    work = [device["pairs_per_head"] for device in found["devices"]]
    assert sum(work) == total * heads
    assert found["max_over_mean"] == pytest.approx(max(work) / np.mean(work))
    held = sorted(
        place
        for device in found["devices"]
        for start, stop in device["first_runs"]
        for place in range(start, stop)
    )
    assert len(held) == len(set(held))
    if all(device["runs"] == len(device["first_runs"]) for device in found["devices"]):
        assert held == list(range(512))


def test_the_schedule_has_the_bytes_and_hops_of_the_library(capsys):
    flags = (*SMALL, "--cp-ring", "4", "--documents", "100,20,250", "--heads", "4")
    flags += ("--kv-heads", "2", "--head-dim", "16", "--layout", "contiguous")
    found = numbers(capsys, "schedule", *flags)
    assert found["hops"] == {"before": 2, "after": 0}
    shape = schedules.AttentionShape(1, 512, 4, 2, 16, 16, 2, segments=True)
    options = schedules.Options(schedules.Hops(2, 0))
    for direction in ("forward", "backward"):
        sent = schedules.sent_bytes("ring", schedules.Degrees(4, 1), shape, direction, options)
        assert found[direction]["sent_bytes_per_device"] == sent
    forward = found["forward"]["sent_bytes_per_device"]
    arrivals = [move for step in found["steps"] for move in step["arrivals"]]
    assert sum(move["bytes"] for move in arrivals) == 4 * forward
    assert arrivals[0].keys() == {
        "keys", "sender", "receiver", "tokens", "bytes", "sent_in_step"
    }  # fmt: skip
    assert found["slowest_over_mean"] >= found["max_over_mean"] > 1


@pytest.mark.parametrize("flags", [
    ("--cp-ring", "128", "--seq-len", "4096", "--layout", "striped"),
    ("--cp-ring", "12", "--seq-len", "1200", "--layout", "contiguous"),
    ("--cp-ring", "8", "--cp-ring-outer", "8", "--seq-len", "2048", "--documents", "one"),
    ("--strategy", "all_gather", "--cp-ring", "32", "--seq-len", "2048"),
    ("--cp-ring", "1", "--seq-len", "2", "--documents", "one"),
    ("--mask", "Causal()", "--documents", ",".join(["3"] * 200), "--cp-ring", "4"),
])  # fmt: skip
def test_large_and_small_splits_fit_100_columns_and_a_file(flags, capsys, tmp_path):
    for picture in ("layout", "schedule"):
        text = shown(capsys, picture, *flags, "--out", str(tmp_path / "x.svg"))
        assert max(map(len, text.splitlines()[:-1])) <= 100


@pytest.mark.parametrize("picture", ["mask", "layout", "schedule"])
def test_files_are_what_their_suffix_says(picture, capsys, tmp_path):
    flags = (picture, *SMALL, "--mask", WINDOW)
    png, svg, again = tmp_path / "a.PNG", tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (png, svg, again):
        assert shown(capsys, *flags, "--out", str(path)).endswith(f"written: {path}\n")
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content[-8:-4] == b"IEND"
    assert min(struct.unpack(">II", content[16:24])) > 400
    assert ET.parse(svg).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert svg.read_bytes() == again.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "one of mask, layout, schedule, got nothing"),
        (["--seq-len", "5"], "what to draw"),
        (["maks"], 'did you mean "mask"'),
        (["mask", "--strategy", "ring"], "no flag --strategy"),
        (["mask", "--mask", "Casual()"], r"SlidingWindow\(left, right\).*got 'Casual\(\)'"),
        (["mask", "--mask", "Chunked(0)"], "Chunked: size must be in"),
        (["mask", "--documents", "5,x"], "such as 100,300,50, got '5,x'"),
        (["mask", "--documents", "5,0"], "at least 1"),
        (["mask", "--documents", "300", "--seq-len", "200"], "use --seq-len 300 or more"),
        (["mask", "--seq-len", "0"], "--seq-len must be at least 1"),
        (["mask", "--blocks", "0"], "--blocks must be in 1..512, got 0"),
        (["mask", "--out", "mask.pdf"], "must end in .png or .svg.*--out mask.svg"),
        (["mask", "--out", "nowhere/mask.svg"], "No such file"),
        (["layout", "--layout", "zigzg"], 'did you mean "zigzag"'),
        (["layout", "--seq-len", "1001"], "pad to 1008"),
        (["layout", "--cp-ring", "0"], "--cp-ring must be at least 1, got 0"),
        (["schedule", "--strategy", "halo"], "mask must bound how far"),
        (["schedule", "--heads", "12", "--strategy", "ulysses"], "num_heads must be"),
        (["schedule", "--heads", "12", "--kv-heads", "4", "--strategy", "ulysses"], "degree of 1"),
        (["schedule", "--head-dim", "0"], "--head-dim must be at least 1, got 0"),
    ],
)
def test_a_mistake_exits_2_and_names_the_remedy(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["show", *arguments]) == 2
    printed = capsys.readouterr()
    assert re.search(expected, printed.err, re.DOTALL), printed.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "Causal",
        "Causal() + Full()",
        "~Causal()",
        "Causal() & 3",
        "Causal().reach()",
        "KeyRanges(1)",
        "Chunked(True)",
        "Chunked(1.5)",
        "Chunked('5')",
        "Chunked(2**3)",
        "Chunked(*[1])",
        "Chunked(**{'size': 1})",
        "Chunked(size=1, size=2)",
        "Chunked(None)",
        "SlidingWindow(1)",
        "masks.Causal()",
        "__import__('os').getcwd()",
        "(lambda: Causal())()",
        "[Causal()][0]",
        "",
        "(" * 5000,
        " & ".join(["Causal()"] * 5000),
    ],
)
def test_only_masks_are_read_and_nothing_is_executed(text):
    with pytest.raises(ValueError, match="--mask must be made of Causal"):
        parse_mask(text)


def test_masks_are_read_as_python_reads_them():
    assert parse_mask(" Causal() & (SlidingWindow(3, None) | PrefixLM(length=4)) ") == Causal() & (
        SlidingWindow(3, None) | PrefixLM(4)
    )
    assert parse_mask("Causal() & Chunked(8) | Chunked(2)") == Causal() & Chunked(8) | Chunked(2)


@pytest.mark.parametrize("seq_len", range(1, 40))
def test_mixed_documents_fit_any_row(seq_len):
    row = make_row("Causal()", seq_len, "mixed")
    assert min(row.documents) >= 1
    assert row.padding >= 0


@pytest.mark.parametrize("picture", ["mask", "layout", "schedule"])
def test_colours_only_repeat_what_characters_say(picture, capsys, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    plain = shown(capsys, picture, *SMALL)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = shown(capsys, picture, *SMALL)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    for columns in (60, 20):  # narrower than 60 is not drawn
        monkeypatch.setenv("COLUMNS", str(columns))
        narrow = re.sub(r"\x1b\[[0-9;]*m", "", shown(capsys, picture, *SMALL))
        assert max(map(len, narrow.splitlines())) <= 60


@pytest.mark.parametrize("picture", ["mask", "layout", "schedule"])
def test_a_terminal_without_unicode_gets_ascii(picture, monkeypatch):
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["show", picture, *SMALL]) == 0
    assert len(raw.getvalue()) > 500


def test_a_missing_matplotlib_is_named_with_its_extra(capsys, monkeypatch, tmp_path):
    for module in ("figures", "canvas", "schedule_figure"):
        monkeypatch.delitem(sys.modules, f"farspan.cli.drawing.{module}", raising=False)
        monkeypatch.delattr(farspan.cli.drawing, module, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["show", "mask", "--out", str(tmp_path / "x.png")]) == 1
    assert "needs matplotlib; pip install 'farspan[show]'" in capsys.readouterr().err
    assert main(["show", "mask"]) == 0


def test_no_device_is_started():
    command = [sys.executable, "-m", "farspan.cli.main", "show", "schedule", *SMALL]
    environment = os.environ | {"JAX_PLATFORMS": "no_such_platform"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_help_names_the_pictures_and_their_flags(capsys):
    assert "schedule" in shown(capsys, "--help")
    text = shown(capsys, "schedule", "--help")
    for flag in ("--mask", "--documents", "--cp-ring-outer", "--kv-heads", "--out", "--json"):
        assert flag in text
