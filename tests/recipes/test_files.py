"""A configuration file is a recipe; what it gets wrong is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from farspan.recipes import RECIPES
from farspan.recipes.files import load_config
from farspan.train.config import Stage, TrainConfig, to_dict

MODEL = to_dict(RECIPES["quickstart"].build())["model"]


def write(tmp_path: Path, values: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


@pytest.mark.parametrize("name", RECIPES)
def test_the_config_of_a_run_folder_is_the_run(name: str, tmp_path: Path) -> None:
    config = dataclasses.replace(
        RECIPES[name].build(), stages=(Stage(5, seq_len=64), Stage(9, rope_theta=8e6)), run_dir="r"
    )
    assert load_config(write(tmp_path, to_dict(config))) == config


def test_what_is_left_out_takes_the_default(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, {"model": MODEL, "data": {"seq_len": 64}}))
    assert config.data.seq_len == 64
    assert config == TrainConfig(
        model=config.model, data=dataclasses.replace(config.data, seq_len=64)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "config.json must be a JSON file, got Expecting"),
        ('{"model": {"norm_eps": NaN}}', "config.json must be a JSON file, got NaN"),
        ([1], "config.json must describe a run, with a model, got list"),
        ({"architectures": [], "vocab": 3}, "with a model, got architectures, vocab; use the conf"),
        ({"model": MODEL, "step": 3}, 'did you mean "steps"'),
        ({"model": {**MODEL, "heads": 3}}, "a name in model must be one of"),
        ({"model": MODEL, "data": {"packing": True}}, "data.packing must be one of best_fit.*True"),
        ({"model": MODEL, "stages": [{"from_step": 3, "seq": 4}]}, r"a name in stages\[0\]"),
        ({"model": {**MODEL, "head_dim": 3}}, "head_dim must be even"),
    ],
)
def test_other_json_is_refused_with_the_reason(values: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(write(tmp_path, values))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"got .*nowhere\.json; name the config\.json"):
        load_config(tmp_path / "nowhere.json")
