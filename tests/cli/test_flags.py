"""Flags that take words of pairs, one for each dataclass of a tuple."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.cli.flags import _format_pairs, parse_flags
from farspan.recipes import get_recipe
from farspan.train.config import Stage, TrainConfig

CONFIG = get_recipe("quickstart").build()


def parse(*arguments: str, default: TrainConfig = CONFIG) -> TrainConfig:
    return parse_flags(default, arguments, prog="farspan train x", description="d")


def test_each_word_is_one_stage_and_other_flags_may_follow() -> None:
    words = ("from_step=1000,seq_len=65536,rope_theta=8e6", "from-step=1200,rope_theta=9,data=7")
    config = parse("--steps", "7", "--stages", *words, "--seq-len", "128", "--no-streaming")
    assert config.stages == (
        Stage(1000, seq_len=65536, rope_theta=8e6),
        Stage(1200, rope_theta=9.0, data="7"),
    )
    assert (config.steps, config.data.seq_len) == (7, 128)
    assert parse(f"--stages={words[0]}", "--steps=7").stages == config.stages[:1]


def test_without_the_flag_the_stages_of_the_recipe_stay_and_with_no_word_they_go() -> None:
    staged = dataclasses.replace(CONFIG, stages=(Stage(5, seq_len=64), Stage(6, rope_theta=8e6)))
    assert parse("--steps", "9", default=staged) == dataclasses.replace(staged, steps=9)
    assert parse("--stages", default=staged).stages == ()


_PATHS = st.text("abc/._=-12", min_size=1).map(lambda path: f"./{path}")
_STAGES = st.builds(
    Stage,
    from_step=st.integers(1, 10**9),
    data=st.none() | _PATHS,
    seq_len=st.none() | st.integers(-5, 10**9),
    rope_theta=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)


@settings(max_examples=25)
@given(st.lists(_STAGES, min_size=1, max_size=3))
def test_words_say_what_stages_hold(stages: list[Stage]) -> None:
    assert parse("--stages", *map(_format_pairs, stages)).stages == tuple(stages)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["from_step=3,seq_lem=4"], '--stages: .*did you mean "seq_len"'),
        (["from_step=3,seq_len=64k"], "--stages: seq_len must be a whole number, got '64k'; use"),
        (["from_step=1e3"], "--stages: from_step must be a whole number, got '1e3'"),
        (["from_step=3,rope_theta=big"], "--stages: rope_theta must be a number, got 'big'"),
        (["from_step=3,rope_theta=nan"], "--stages: rope_theta must be a number, got 'nan'"),
        (["seq_len=4"], "--stages: from_step must be given, got seq_len; add from_step"),
        (["from_step=3,seq_len=4,seq-len=5"], "--stages: .* every key once, got seq_len twice"),
        (["from_step=3", "seq_len"], "--stages: .* got 'seq_len' in 'seq_len'; the keys are from_"),
        (["from_step="], "--stages: .* got 'from_step=' in"),
        (["from_step=3", "--stages", "from_step=4"], "--stages must be given once, got it again"),
    ],
)
def test_a_mistake_in_a_word_names_the_remedy(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse("--stages", *words)


def test_help_shows_how_words_are_written_and_what_the_recipe_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    staged: Any = dataclasses.replace(CONFIG, stages=(Stage(5, seq_len=64),))
    with pytest.raises(SystemExit):
        parse("--help", default=staged)
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--stages [KEY=VALUE,... ...] Later parts of the run" in text
    assert "(default: from_step=5,seq_len=64)" in text
