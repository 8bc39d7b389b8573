"""The stream: each row once an epoch, reproducible, resumable, held-out rows never in it."""

import dataclasses
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from farspan.data import Batch, ByteTokenizer, Document, Loader, make_loader
from farspan.types import PAD_SEGMENT_ID


def numbered(count, length=4):
    """Documents that tell which they are: `length` times the same byte."""
    return [Document(str(i), bytes([i]) * length) for i in range(count)]


def loader_of(documents, **options):
    settings = {"seq_len": 4, "packing": False, "batch_size": 3, "seed": 0} | options
    return Loader(documents, ByteTokenizer(), **settings)


def draw(loader, batches):
    return list(itertools.islice(loader, batches))


def row_ids(batches):
    return [int(row[0]) for batch in batches for row in batch.tokens]


def assert_same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True):
            np.testing.assert_array_equal(x, y)


class TestEpochs:
    def test_each_row_once_an_epoch_in_another_order_each_time(self):
        ids = row_ids(draw(loader_of(numbered(100), batch_size=4), 75))
        epochs = [ids[start : start + 100] for start in (0, 100, 200)]
        assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        assert list(range(100)) not in epochs

    def test_epochs_that_batches_do_not_divide_lose_no_row(self):
        ids = row_ids(draw(loader_of(numbered(10), batch_size=3), 10))
        for start in (0, 10, 20):
            assert sorted(ids[start : start + 10]) == list(range(10))

    def test_shuffles_over_the_whole_corpus(self):
        ids = row_ids(draw(loader_of(numbered(100), batch_size=25), 1))
        assert {i // 25 for i in ids} == {0, 1, 2, 3}

    @pytest.mark.parametrize("batch_size", [1, 2, 5])
    def test_any_batch_size_up_to_the_rows(self, batch_size):
        batches = draw(loader_of(numbered(5), batch_size=batch_size), 10)
        assert {batch.tokens.shape for batch in batches} == {(batch_size, 4)}
        assert sorted(row_ids(batches)[:5]) == list(range(5))

    def test_same_seed_same_batches_other_seed_other_order(self):
        first, again = (draw(loader_of(numbered(50), seed=3), 40) for _ in range(2))
        assert_same(first, again)
        others = [row_ids(draw(loader_of(numbered(50), seed=seed), 40)) for seed in (2, 4)]
        # A neighbouring seed's first epoch must not be this seed's second either.
        orders = {tuple(ids[at : at + 50]) for ids in [row_ids(first), *others] for at in (0, 50)}
        assert len(orders) == 6


class TestResume:
    @pytest.mark.parametrize("taken", [0, 1, 7, 40])
    def test_restored_stream_goes_on_bit_for_bit(self, taken):
        options = {"packing": True, "seq_len": 64, "batch_size": 2, "seed": 5, "eval_rows": 2}
        documents = [Document(str(i), bytes(range(1, i % 90 + 2))) for i in range(60)]
        loader = loader_of(documents, **options)
        draw(loader, taken)
        state = json.loads(json.dumps(loader.state()))
        expected = draw(loader, 30)
        other = loader_of(documents, **options)
        draw(other, 3)
        other.restore(state)
        assert other.state() == state
        assert_same(draw(other, 30), expected)

    def test_state_is_taken_by_value(self):
        loader = loader_of(numbered(10))
        state = loader.state()
        before = json.dumps(state)
        draw(loader, 3)
        assert json.dumps(state) == before

    def test_prefetched_batches_are_not_counted_as_taken(self):
        loader = loader_of(numbered(10))
        draw(loader, 2)
        assert loader.state() == loader.state()
        state = loader.state()
        (after,) = draw(loader, 1)
        loader.restore(state)
        assert_same(draw(loader, 1), [after])

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"seed": 1}, r"seed \(saved 0, now 1\)"),
            ({"batch_size": 2}, r"batch_size \(saved 3, now 2\)"),
            ({"seq_len": 5}, r"seq_len \(saved 4, now 5\)"),
            ({"packing": True}, r"packing \(saved False, now True\)"),
            ({"eval_rows": 1}, r"eval_rows \(saved 0, now 1\)"),
            ({"documents": numbered(11)}, r"data \(saved '\w+', now '\w+'\)"),
        ],
    )
    def test_state_of_other_data_or_settings_is_refused(self, change, words):
        state = loader_of(numbered(10)).state()
        other = loader_of(**{"documents": numbered(10)} | change)
        with pytest.raises(ValueError, match=words):
            other.restore(state)

    def test_texts_cut_at_other_places_are_other_data(self):
        state = loader_of([Document("a", b"abcdef"), Document("b", b"ghi")], batch_size=1).state()
        other = loader_of([Document("a", b"abc"), Document("b", b"defghi")], batch_size=1)
        with pytest.raises(ValueError, match="another data"):
            other.restore(state)

    def test_unknown_version_is_refused(self):
        with pytest.raises(ValueError, match="version 1, got None"):
            loader_of(numbered(10)).restore({})


class TestHeldOut:
    def test_held_out_rows_are_never_trained_on(self):
        loader = loader_of(numbered(20), eval_rows=5)
        held_out = [i for batch in loader.eval_batches() for i in real_rows(batch)]
        assert (loader.train_rows, loader.eval_rows, len(held_out)) == (15, 5, 5)
        assert sorted(held_out + row_ids(draw(loader, 5))) == list(range(20))
        assert not set(held_out) & set(row_ids(draw(loader, 50)))

    def test_batches_are_full_sized_and_the_same_every_time(self):
        loader = loader_of(numbered(20), eval_rows=5, batch_size=3)
        batches = list(loader.eval_batches())
        assert {batch.tokens.shape for batch in batches} == {(3, 4)}
        assert (batches[-1].segment_ids[2] == PAD_SEGMENT_ID).all()
        assert_same(batches, list(loader.eval_batches()))
        assert_same(batches, list(loader_of(numbered(20), eval_rows=5).eval_batches()))

    def test_choice_depends_on_the_seed_and_is_spread(self):
        choices = []
        for seed in range(5):
            loader = loader_of(numbered(100), eval_rows=10, seed=seed)
            choices.append(frozenset(i for b in loader.eval_batches() for i in real_rows(b)))
        assert len(set(choices)) == 5
        assert choices[0] != frozenset(range(90, 100))

    def test_none_by_default(self):
        assert list(loader_of(numbered(5)).eval_batches()) == []


def real_rows(batch: Batch):
    return [int(row[0]) for row in batch.tokens[batch.segment_ids[:, 0] != PAD_SEGMENT_ID]]


class TestArguments:
    def test_too_few_rows_for_a_batch(self):
        with pytest.raises(ValueError, match=r"got 2 rows for batch_size=3 .*use batch_size=2, a"):
            loader_of(numbered(2))

    def test_too_few_rows_left_by_the_held_out(self):
        with pytest.raises(ValueError, match=r"got 2 rows .*eval_rows=8\); use .*fewer eval_rows"):
            loader_of(numbered(10), eval_rows=8)
        with pytest.raises(ValueError, match=r"got 0 rows .*; use fewer eval_rows"):
            loader_of(numbered(10), eval_rows=100)

    def test_no_text(self):
        for documents in ([], [Document("a", b"")]):
            with pytest.raises(ValueError, match=r"got 0 rows .*0 tokens.*; use a shorter"):
                loader_of(documents)

    @pytest.mark.parametrize(
        ("name", "value"),
        [("batch_size", 0), ("seed", -1), ("seed", 2**32), ("eval_rows", -1), ("seq_len", 0)],
    )
    def test_value_out_of_range_is_named(self, name, value):
        with pytest.raises(ValueError, match=rf"{name} must be .*got {value}"):
            loader_of(numbered(10), **{name: value})

    def test_tokenizer_that_exceeds_its_vocabulary_is_caught_before_training(self):
        class Wrong(ByteTokenizer):
            vocab_size = 5

        with pytest.raises(ValueError, match=r"document 5: token ids .* got 5 at index"):
            Loader(numbered(9), Wrong(), seq_len=4, packing=True, batch_size=1, seed=0)


class TestReport:
    def test_rows_in_which_nothing_can_be_predicted_are_left_out_and_reported(self):
        documents = numbered(6) + [Document("one", b"!")] * 2
        loader = loader_of(documents, batch_size=2)
        assert (loader.report.rows, loader.train_rows) == (8, 6)
        assert "left out: 2 rows of one-token documents" in loader.describe()
        assert ord("!") not in row_ids(draw(loader, 20))

    def test_nothing_but_one_token_documents_is_refused(self):
        with pytest.raises(ValueError, match="got 0 rows"):
            loader_of([Document("one", b"!")] * 64, seq_len=64, packing=True, batch_size=1)

    def test_one_token_rest_of_a_split_document_still_counts(self):
        loader = loader_of([Document("a", b"abcde")], batch_size=1)
        # "abcd" is followed by "e", which itself predicts nothing.
        assert (loader.report.rows, loader.train_rows) == (2, 1)
        (batch,) = draw(loader, 1)
        assert batch.labels.tolist() == [list(b"bcde")]

    def test_description_counts_everything(self):
        documents = [Document("long", b"x" * 100), Document("empty", b""), *numbered(5)]
        loader = loader_of(documents, seq_len=40, packing=True, batch_size=2, eval_rows=1)
        assert loader.report.tokens_in == loader.report.tokens_out == 120
        assert loader.describe().splitlines() == [
            "7 documents, 120 tokens (byte, vocabulary 258)",
            "3 rows of 40 tokens, 0.00% padding, 8 pieces, 1 documents split over rows",
            "2 rows for training (1.0 batches of 2 an epoch), 1 held out",
            "left out: 1 empty documents",
        ]


def test_make_loader_from_configuration_values(tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text(str(i) * 8)
    loader = make_loader(str(tmp_path), seq_len=16, batch_size=2, packing=True, seed=1)
    assert loader.report.rows == 2
    (batch,) = draw(loader, 1)
    assert (batch.segment_ids == [[1] * 8 + [2] * 8] * 2).all()
    with pytest.raises(ValueError, match="tokenizer must be one of byte, got 'bite'"):
        make_loader(str(tmp_path), tokenizer="bite", seq_len=16, batch_size=2)


def test_import_and_packing_need_neither_jax_nor_grain():
    code = (
        "import sys, farspan.data as data\n"
        "documents = [data.Document('a', b'abcd')]\n"
        "loader = data.Loader(documents, data.ByteTokenizer(), seq_len=4, packing=True,"
        " batch_size=1, seed=0)\n"
        "loader.describe()\n"
        "assert not {'jax', 'grain'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
