"""Decoding: plain values become dataclasses, or the message names the field and its type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from farspan.train.decode import decode


@dataclass(frozen=True)
class Leaf:
    """Values of every kind."""

    whole: int
    number: float = 1.0
    truth: bool = False
    text: str = ""
    choice: Literal["left", "right"] = "left"
    perhaps: int | None = 3


@dataclass(frozen=True)
class Tree:
    """A leaf, and more of them."""

    leaf: Leaf
    leaves: tuple[Leaf, ...] = ()


def test_every_kind_of_field_is_read_and_the_rest_takes_its_default() -> None:
    values = {
        "leaf": {"whole": 2, "number": 3, "truth": True, "text": "x", "choice": "right"},
        "leaves": [{"whole": 4, "perhaps": None}, {"whole": 5}],
    }
    tree = decode(Tree, values, "f")
    assert tree == Tree(Leaf(2, 3.0, True, "x", "right"), (Leaf(4, perhaps=None), Leaf(5)))
    assert type(tree.leaf.number) is float


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"leaf": {"whole": True}}, "f: leaf.whole must be a whole number, got True; use digits"),
        ({"leaf": {"whole": 2.0}}, "f: leaf.whole must be a whole number, got 2.0"),
        ({"leaf": {"whole": 1, "number": "2"}}, "f: leaf.number must be a number, got '2'"),
        ({"leaf": {"whole": 1, "number": True}}, "f: leaf.number must be a number, got True"),
        ({"leaf": {"whole": 1, "truth": 1}}, "f: leaf.truth must be true or false, got 1"),
        ({"leaf": {"whole": 1, "text": None}}, "f: leaf.text must be text, got None"),
        ({"leaf": {"whole": 1, "perhaps": "x"}}, "f: leaf.perhaps must be a whole number, got 'x'"),
        ({"leaf": {"whole": 1, "choice": "rigth"}}, 'f: leaf.choice must be.*mean "right"'),
        ({"leaf": {"whole": 1}, "leaves": 3}, r"f: leaves must be a list, got 3; use \[...\]"),
        (
            {"leaf": {"whole": 1}, "leaves": [{}]},
            r"f: leaves\[0\].whole must be given, got nothing",
        ),
        ({"leaf": 3}, "f: leaf must be an object, got 3"),
        ({}, "f: leaf must be given, got nothing; add leaf"),
        ({"leaf": {"whole": 1, "numbre": 2}}, 'f: a name in leaf must be.*did you mean "number"'),
        ({"laef": {}}, 'f: a name in it must be.*did you mean "leaf"'),
    ],
)
def test_a_mistake_names_the_field_the_value_and_the_remedy(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decode(Tree, values, "f")
