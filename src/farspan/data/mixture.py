"""Several sources in one run: the file that names them, their shares, how often what is seen."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard, cast

import numpy as np
from jaxtyping import Float64, Int64

from farspan.data.reading.files import list_files
from farspan.data.reading.sources import STDLIB
from farspan.errors import unknown_choice
from farspan.platform import is_url

_SUFFIX = ".toml"
_FIELDS = ("data", "weight", "text_field", "length_weights")


@dataclass(frozen=True)
class LengthWeights:
    """How often documents are seen in an epoch, by their length.

    Attributes:
      thresholds: Tokens from which on each weight holds, ascending; below the first, 1 holds.
      weights: How often, >= 0.
    """

    thresholds: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def of(self, lengths: Int64[np.ndarray, "_"]) -> Float64[np.ndarray, "_"]:
        """Returns the weight of documents with so many tokens, float64 of the same shape."""
        index = np.searchsorted(np.array(self.thresholds, np.int64), lengths, side="right")
        return np.array((1.0, *self.weights))[index]

    def occurrences(
        self, lengths: Int64[np.ndarray, "n"], draws: Float64[np.ndarray, "n"]
    ) -> Int64[np.ndarray, "n"]:
        """Says how often each document occurs in an epoch.

        Args:
          lengths: Tokens of each document.
          draws: A random number of its own for each, in [0, 1).

        Returns:
          floor(weight), and one more with the probability of its fraction; int64 [documents].
        """
        weights = self.of(lengths)
        whole = np.floor(weights).astype(np.int64)
        return whole + (draws < weights - whole)


@dataclass(frozen=True)
class Part:
    """One source of a mixture.

    Attributes:
      data: What `open_source` takes.
      weight: Its share of the tokens trained on, relative to the other weights; above 0.
      text_field: The field of the text.
      length_weights: How often its documents are seen.
    """

    data: str
    weight: float
    text_field: str
    length_weights: LengthWeights = LengthWeights()


def read_mixture(data: str, text_field: str = "text") -> tuple[Part, ...]:
    """Reads what to train on: the parts of a mixture, or the one source that `data` is.

    Args:
      data: Path or URL of a .toml file with a table `[[source]]` for each part, or what
        `open_source` takes. Paths in the file are relative to its folder.
      text_field: The field of the text where a part names none.

    Returns:
      The parts, at least one.

    Raises:
      FileNotFoundError: There is no such file.
      ValueError: The file is not as described; the message says where.
    """
    if PurePosixPath(data).suffix.lower() != _SUFFIX:
        return (Part(data, 1.0, text_field),)
    try:
        content = tomllib.loads(_read(data))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"mixture: {data} must be TOML, got {error}; correct the file") from error
    for name in content:
        if name != "source":
            raise unknown_choice(f"mixture: a table in {data}", name, ("source",))
    tables: Any = content.get("source")
    if not isinstance(tables, list) or not tables:
        raise ValueError(
            f"mixture: {data} must name its sources, got none; write a table [[source]] with data "
            f"and weight for each"
        )
    return tuple(
        _part(f"mixture: {data}, source {number}", data, table, text_field)
        for number, table in enumerate(cast("list[Any]", tables), start=1)
    )


def _read(data: str) -> str:
    listing = list_files(data)
    if listing.is_folder:
        raise ValueError(f"mixture: {data} must be a file, got a folder; name the file")
    with listing.files[0].open() as file:
        return file.read().decode()


def _part(place: str, mixture: str, table: Any, text_field: str) -> Part:
    if not isinstance(table, dict):
        raise ValueError(f"{place} must be a table, got {table!r}; write it as [[source]]")
    fields = cast("Mapping[str, Any]", table)
    for name in fields:
        if name not in _FIELDS:
            raise unknown_choice(f"{place}: a field", name, _FIELDS)
    data, field = fields.get("data"), fields.get("text_field", text_field)
    for name, value in (("data", data), ("text_field", field)):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f'{place}: {name} must be text, got {value!r}; write {name} = "..."')
    data = cast("str", data)
    if PurePosixPath(data).suffix.lower() == _SUFFIX:
        raise ValueError(
            f"{place}: data must not be a mixture itself, got {data!r}; list its sources here"
        )
    weight = fields.get("weight")
    if not _is_number(weight) or weight <= 0:
        raise ValueError(
            f"{place}: weight must be a number above 0, got {weight!r}; write for example "
            f"weight = 1, or leave the source out"
        )
    return Part(
        _resolve(mixture, data),
        float(weight),
        cast("str", field),
        _length_weights(place, fields.get("length_weights", [])),
    )


def _resolve(mixture: str, data: str) -> str:
    if data == STDLIB or is_url(data):
        return data
    if is_url(mixture):
        return mixture.rpartition("/")[0] + "/" + data
    return str(Path(mixture).expanduser().parent / Path(data).expanduser())


def _length_weights(place: str, pairs: Any) -> LengthWeights:
    rule = f"{place}: length_weights must be pairs [tokens, weight] with ascending tokens"
    remedy = "write for example length_weights = [[0, 1], [32768, 4]]"
    if not isinstance(pairs, list):
        raise ValueError(f"{rule}, got {pairs!r}; {remedy}")
    thresholds: list[int] = []
    weights: list[float] = []
    for pair in cast("list[Any]", pairs):
        if not isinstance(pair, list) or len(cast("list[Any]", pair)) != 2:
            raise ValueError(f"{rule}, got {pair!r}; {remedy}")
        tokens, weight = cast("list[Any]", pair)
        if not _is_number(tokens) or tokens != int(tokens) or tokens < 0:
            raise ValueError(f"{rule}, got {tokens!r} tokens; {remedy}")
        if not _is_number(weight) or weight < 0:
            raise ValueError(f"{rule} and weights of 0 or more, got {weight!r}; {remedy}")
        if thresholds and tokens <= thresholds[-1]:
            raise ValueError(f"{rule}, got {tokens} after {thresholds[-1]}; sort them")
        thresholds.append(int(tokens))
        weights.append(float(weight))
    return LengthWeights(tuple(thresholds), tuple(weights))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Interleave:
    """Deals rows out to sources by their shares, each row in constant time.

    After any number of rows every source has had its share of them, but for fewer rows than there
    are sources.

    Args:
      weights: Relative shares, above 0, taken as the decimals that they are printed as.
    """

    def __init__(self, weights: Sequence[float]):
        fractions = [Fraction(repr(weight)) for weight in weights]
        scale = math.lcm(*(fraction.denominator for fraction in fractions))
        self._shares = [int(fraction * scale) for fraction in fractions]

    def counts(self, rows: int) -> list[int]:
        """Returns how many of the first `rows` rows come from each source."""
        counts: list[int] = []
        remaining = sum(self._shares)
        for share in self._shares:
            passed_on = rows * (remaining - share) // remaining
            counts.append(rows - passed_on)
            rows, remaining = passed_on, remaining - share
        return counts

    def __getitem__(self, row: int) -> tuple[int, int]:
        """Returns the source of row `row`, counted from 0, and which of its rows it is."""
        before, after = self.counts(row), self.counts(row + 1)
        source = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b)
        return source, before[source]

    @property
    def shares(self) -> list[float]:
        """The shares; their sum is 1."""
        return [share / sum(self._shares) for share in self._shares]
