"""Mixtures: the file, the shares of rows, and how often documents are seen."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.data import Interleave, LengthWeights, Part, read_mixture
from farspan.types import PAD_SEGMENT_ID


def mixture(folder, text):
    path = folder / "mix.toml"
    path.write_text(text)
    return str(path)


class TestFile:
    def test_parts_with_paths_beside_the_file(self, tmp_path):
        text = """
            [[source]]
            data = "books/part.txt"
            weight = 0.7
            text_field = "content"
            length_weights = [[0, 0.5], [32768, 4]]
            [[source]]
            data = "stdlib"
            weight = 1
            [[source]]
            data = "gs://bucket/c.jsonl"
            weight = 2
        """
        assert read_mixture(mixture(tmp_path, text), "body") == (
            Part(
                f"{tmp_path}/books/part.txt",
                0.7,
                "content",
                LengthWeights((0, 32768), (0.5, 4.0)),
            ),
            Part("stdlib", 1.0, "body"),
            Part("gs://bucket/c.jsonl", 2.0, "body"),
        )

    def test_anything_else_is_one_source(self):
        assert read_mixture("notes.txt", "body") == (Part("notes.txt", 1.0, "body"),)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("data = 3", r"a table in .*mix.toml must be one of source, got 'data'"),
            ("", r"must name its sources, got none"),
            ("[[source]", r"must be TOML"),
            ('[[source]]\nweight = 1\ndata = ""', r"source 1: data must be text, got ''"),
            ("[[source]]\nweight = 1", r"source 1: data must be text, got None"),
            ('[[source]]\ndata = "a"', r"weight must be a number above 0, got None"),
            ('[[source]]\ndata = "a"\nweight = 0', r"weight must be a number above 0, got 0"),
            ('[[source]]\ndata = "a"\nweight = -1.5', r"above 0, got -1.5"),
            ('[[source]]\ndata = "a"\nweight = true', r"above 0, got True"),
            ('[[source]]\ndata = "a"\nweight = inf', r"above 0, got inf"),
            ('[[source]]\ndata = "a"\nweights = 1', r"'weights'; did you mean \"weight\"\?"),
            ('[[source]]\ndata = "b.toml"\nweight = 1', r"must not be a mixture itself"),
            ("LENGTHS = 3", r"must be pairs .*got 3"),
            ("LENGTHS = [[1]]", r"must be pairs .*got \[1\]"),
            ("LENGTHS = [[5, 1], [5, 2]]", r"ascending tokens, got 5 after 5"),
            ("LENGTHS = [[0.5, 1]]", r"got 0.5 tokens"),
            ("LENGTHS = [[0, -1]]", r"weights of 0 or more, got -1"),
        ],
    )
    def test_what_is_wrong_is_named(self, tmp_path, text, words):
        text = text.replace("LENGTHS", '[[source]]\ndata = "a"\nweight = 1\nlength_weights')
        with pytest.raises(ValueError, match=words):
            read_mixture(mixture(tmp_path, text))

    def test_missing_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="must be an existing path"):
            read_mixture(str(tmp_path / "mix.toml"))


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=5), st.integers(0, 10**12))
def test_every_source_has_its_share_of_any_number_of_rows(weights, rows):
    dealt = Interleave(weights)
    counts = dealt.counts(rows)
    assert sum(counts) == rows
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - rows * weight / sum(weights)) < len(weights) + rows * 1e-12
    source, index = dealt[rows]
    after = list(counts)
    after[source] += 1
    assert (dealt.counts(rows + 1), index) == (after, counts[source])


def test_length_weights_by_hand():
    weights = LengthWeights((10, 20), (0.25, 2.5))
    lengths = np.array([1, 9, 10, 19, 20, 20])
    assert weights.of(lengths).tolist() == [1, 1, 0.25, 0.25, 2.5, 2.5]
    draws = np.array([0.9, 0.9, 0.2, 0.3, 0.4, 0.6])
    assert weights.occurrences(lengths, draws).tolist() == [1, 1, 1, 0, 3, 2]
    assert LengthWeights().occurrences(lengths, draws).tolist() == [1] * 6


LONG, SHORT = 12, 4


@pytest.fixture
def two_sources(tmp_path):
    """`a.jsonl`: letters a to z, 20 long and 6 short; `b.jsonl`: ten digits; weights 3 and 1."""
    letters = [chr(97 + i) * (LONG if i < 20 else SHORT) for i in range(26)]
    for name, lines in (("a", letters), ("b", [str(i) * SHORT for i in range(10)])):
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (tmp_path / f"{name}.jsonl").write_text(text)

    def write(extra=""):
        return mixture(
            tmp_path,
            f'[[source]]\ndata = "a.jsonl"\nweight = 0.75\n{extra}\n'
            f'[[source]]\ndata = "b.jsonl"\nweight = 0.25\n',
        )

    return write


@pytest.fixture
def loader_of(open_loader, tmp_path):
    settings = {"tokenizer": "byte", "seq_len": LONG, "packing": "none", "batch_size": 4, "seed": 0}
    settings["cache_dir"] = str(tmp_path / ".cache")
    return lambda data, **options: open_loader(data, **(settings | options))


def letters_of(batches):
    return [chr(row[0]) for batch in batches for row in batch.tokens]


@pytest.mark.parametrize("streaming", [False, True])
class TestMixed:
    def test_every_batch_has_the_shares_and_each_source_its_epochs(
        self, two_sources, loader_of, streaming
    ):
        loader = loader_of(two_sources(), streaming=streaming)
        rows = letters_of(itertools.islice(loader, 52))
        assert {sum(c.isdigit() for c in rows[at : at + 4]) for at in range(0, 208, 4)} == {1}
        letters = [c for c in rows if c.isalpha()]
        digits = [c for c in rows if c.isdigit()]
        for items, size in ((letters, 26), (digits, 10)):
            for begin in range(0, len(items) - size + 1, size):
                assert len(set(items[begin : begin + size])) == size
        said = "a.jsonl: 1 shards, read while training, 75.00%" if streaming else "a.jsonl (75.00%"
        assert f"{said} of the rows" in loader.describe()

    def test_resumes_after_any_batch(self, two_sources, loader_of, streaming):
        data = two_sources("length_weights = [[0, 1.5], [12, 0.5]]")
        loader = loader_of(data, streaming=streaming, shuffle_window_rows=3)
        states, batches = [loader.state()], []
        for batch in itertools.islice(loader, 12):
            batches.append(batch.tokens)
            states.append(json.loads(json.dumps(loader.state())))
        for taken in range(12):
            other = loader_of(data, streaming=streaming, shuffle_window_rows=3)
            other.restore(states[taken])
            for expected in batches[taken : taken + 3]:
                np.testing.assert_array_equal(next(other).tokens, expected)

    def test_state_of_other_weights_is_refused(self, two_sources, loader_of, streaming):
        state = loader_of(two_sources(), streaming=streaming).state()
        other = two_sources("length_weights = [[0, 2]]")
        with pytest.raises(ValueError, match="another mixture"):
            loader_of(other, streaming=streaming).restore(state)

    def test_documents_are_seen_as_often_as_their_length_says(
        self, two_sources, loader_of, streaming
    ):
        data = two_sources(f"length_weights = [[{LONG}, 2]]")
        loader = loader_of(data, streaming=streaming)
        rows = letters_of(itertools.islice(loader, 16))
        epoch = Counter([c for c in rows if c.isalpha()][:46])
        assert epoch == {chr(97 + i): 2 if i < 20 else 1 for i in range(26)}


def test_unigram_loss_is_that_of_the_mixed_tokens(two_sources, loader_of):
    loader = loader_of(two_sources())
    tokens = 20 * LONG + 6 * SHORT
    shares = [0.75 * LONG / tokens] * 20 + [0.75 * SHORT / tokens] * 6 + [0.25 / 10] * 10
    assert loader.unigram_loss == pytest.approx(-sum(p * np.log(p) for p in shares))


def test_counts_of_repeats_and_documents_left_out_add_up_over_an_epoch(
    two_sources, loader_of, tmp_path
):
    two_sources()
    text = f'[[source]]\ndata = "a.jsonl"\nweight = 1\nlength_weights = [[0, 0.5], [{LONG}, 2.5]]'
    for streaming in (False, True):
        loader = loader_of(mixture(tmp_path, text), streaming=streaming, batch_size=1)
        first = next(loader)
        counts = loader.counts()
        epoch = [first, *itertools.islice(loader, counts["rows_train"] - 1)]
        seen = [Counter(letters_of(epoch))[chr(97 + i)] for i in range(26)]
        assert set(seen[:20]) == {2, 3}
        assert set(seen[20:]) == {0, 1}
        assert counts["documents_left_out"] == seen.count(0)
        assert counts["documents_repeated"] == sum(seen[:20]) - 20
        assert counts["tokens_repeated"] == LONG * counts["documents_repeated"]
        assert counts["tokens_left_out"] == SHORT * counts["documents_left_out"]
        assert_adds_up(counts, LONG)


def test_repeated_documents_do_not_leak_into_the_held_out_rows(two_sources, loader_of):
    data = two_sources("length_weights = [[0, 3]]")
    loader = loader_of(data, eval_rows=8)
    held = {
        chr(row[0])
        for batch in loader.eval_batches()
        for row in batch.tokens[batch.segment_ids[:, 0] != PAD_SEGMENT_ID]
    }
    assert len(held) == loader.eval_rows == 8
    assert sum(c.isdigit() for c in held) == 2
    counts = loader.counts()
    rows = letters_of(itertools.islice(loader, counts["rows_train"]))
    assert not held & set(rows)
    assert counts["documents_repeated"] == 2 * 20
    assert_adds_up(counts, LONG)


def assert_adds_up(counts, seq_len):
    assert (
        counts["tokens_in"] - counts["tokens_left_out"] + counts["tokens_repeated"]
        == counts["tokens_packed"]
        == counts["tokens_train"] + counts["tokens_eval"] + counts["tokens_unlabelled"]
    )
    assert counts["tokens_packed"] + counts["tokens_padded"] == counts["rows"] * seq_len
    assert counts["rows"] == counts["rows_train"] + counts["rows_eval"] + counts["rows_unlabelled"]
