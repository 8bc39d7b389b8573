"""The stream: each row once an epoch, reproducible, resumable, held-out rows never in it."""

import dataclasses
import hashlib
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest

from farspan.data import Batch
from farspan.types import IGNORE_LABEL, PAD_SEGMENT_ID


def numbered(count, length=4):
    """Documents that tell which they are: `length` times the same ASCII character."""
    return [chr(i + 1) * length for i in range(count)]


@pytest.fixture
def loader_of(open_loader, tmp_path):
    """Makes a loader over documents, which lie in a file of JSON lines."""

    def write(documents):
        text = "".join(json.dumps({"text": each}) + "\n" for each in documents)
        folder = tmp_path / hashlib.blake2b(text.encode()).hexdigest()[:8]
        folder.mkdir(exist_ok=True)
        if not (folder / "data.jsonl").exists():
            (folder / "data.jsonl").write_text(text)
        return str(folder / "data.jsonl")

    def make(documents, **options):
        settings = {
            "tokenizer": "byte",
            "seq_len": 4,
            "packing": "none",
            "batch_size": 3,
            "seed": 0,
            "cache_dir": str(tmp_path / "cache"),
        } | options
        if "eval_data" in settings:
            settings["eval_data"] = write(settings["eval_data"])
        return open_loader(write(documents), **settings)

    return make


def draw(loader, batches):
    return list(itertools.islice(loader, batches))


def row_ids(batches):
    return [int(row[0]) - 1 for batch in batches for row in batch.tokens]


def assert_same(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True):
            np.testing.assert_array_equal(x, y)


class TestEpochs:
    def test_each_row_once_an_epoch_in_another_order_each_time(self, loader_of):
        ids = row_ids(draw(loader_of(numbered(100), batch_size=4), 75))
        epochs = [ids[start : start + 100] for start in (0, 100, 200)]
        assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        assert list(range(100)) not in epochs

    def test_epochs_that_batches_do_not_divide_lose_no_row(self, loader_of):
        ids = row_ids(draw(loader_of(numbered(10), batch_size=3), 10))
        for start in (0, 10, 20):
            assert sorted(ids[start : start + 10]) == list(range(10))

    def test_shuffles_over_the_whole_corpus(self, loader_of):
        ids = row_ids(draw(loader_of(numbered(100), batch_size=25), 1))
        assert {i // 25 for i in ids} == {0, 1, 2, 3}

    @pytest.mark.parametrize("batch_size", [1, 2, 5])
    def test_any_batch_size_up_to_the_rows(self, loader_of, batch_size):
        batches = draw(loader_of(numbered(5), batch_size=batch_size), 10)
        assert {batch.tokens.shape for batch in batches} == {(batch_size, 4)}
        assert sorted(row_ids(batches)[:5]) == list(range(5))

    def test_same_seed_same_batches_other_seed_other_order(self, loader_of):
        first, again = (draw(loader_of(numbered(50), seed=3), 40) for _ in range(2))
        assert_same(first, again)
        others = [row_ids(draw(loader_of(numbered(50), seed=seed), 40)) for seed in (2, 4)]
        # A neighbouring seed's first epoch must not be this seed's second either.
        orders = {tuple(ids[at : at + 50]) for ids in [row_ids(first), *others] for at in (0, 50)}
        assert len(orders) == 6


class TestResume:
    @pytest.mark.parametrize("taken", [0, 1, 7, 40])
    def test_restored_stream_goes_on_bit_for_bit(self, loader_of, taken):
        options = {"packing": "best_fit", "seq_len": 64, "batch_size": 2, "seed": 5, "eval_rows": 2}
        documents = [bytes(range(1, i % 90 + 2)).decode() for i in range(60)]
        loader = loader_of(documents, **options)
        draw(loader, taken)
        state = json.loads(json.dumps(loader.state()))
        expected = draw(loader, 30)
        other = loader_of(documents, **options)
        draw(other, 3)
        other.restore(state)
        assert other.state() == state
        assert_same(draw(other, 30), expected)

    def test_state_is_taken_by_value(self, loader_of):
        loader = loader_of(numbered(10))
        state = loader.state()
        before = json.dumps(state)
        draw(loader, 3)
        assert json.dumps(state) == before

    def test_prefetched_batches_are_not_counted_as_taken(self, loader_of):
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
            ({"packing": "best_fit"}, r"packing \(saved 'none', now 'best_fit'\)"),
            ({"eval_rows": 1}, r"eval_rows \(saved 0, now 1\)"),
            ({"documents": numbered(11)}, r"data \(saved \['\w+'\], now \['\w+'\]\)"),
            ({"append_eos": True}, r"tokenizer \(saved 'byte.*', now 'byte, eos 257"),
            ({"streaming": True}, r"streaming \(saved False, now True\)"),
        ],
    )
    def test_state_of_other_data_or_settings_is_refused(self, loader_of, change, words):
        state = loader_of(numbered(10)).state()
        other = loader_of(**{"documents": numbered(10)} | change)
        with pytest.raises(ValueError, match=words):
            other.restore(state)

    def test_texts_cut_at_other_places_are_other_data(self, loader_of):
        state = loader_of(["abcdef", "ghi"], batch_size=1).state()
        other = loader_of(["abc", "defghi"], batch_size=1)
        with pytest.raises(ValueError, match="another data"):
            other.restore(state)

    def test_unknown_version_is_refused(self, loader_of):
        with pytest.raises(ValueError, match="version 2, got None"):
            loader_of(numbered(10)).restore({})


class TestHeldOut:
    def test_held_out_rows_are_never_trained_on(self, loader_of):
        loader = loader_of(numbered(20), eval_rows=5)
        held_out = [i for batch in loader.eval_batches() for i in real_rows(batch)]
        assert (loader.counts()["rows_train"], loader.eval_rows, len(held_out)) == (15, 5, 5)
        assert sorted(held_out + row_ids(draw(loader, 5))) == list(range(20))
        assert not set(held_out) & set(row_ids(draw(loader, 50)))

    def test_batches_are_full_sized_and_the_same_every_time(self, loader_of):
        loader = loader_of(numbered(20), eval_rows=5, batch_size=3)
        batches = list(loader.eval_batches())
        assert {batch.tokens.shape for batch in batches} == {(3, 4)}
        assert (batches[-1].segment_ids[2] == PAD_SEGMENT_ID).all()
        assert_same(batches, list(loader.eval_batches()))
        assert_same(batches, list(loader_of(numbered(20), eval_rows=5).eval_batches()))

    def test_choice_depends_on_the_seed_and_is_spread(self, loader_of):
        choices = []
        for seed in range(5):
            loader = loader_of(numbered(100), eval_rows=10, seed=seed)
            choices.append(frozenset(i for b in loader.eval_batches() for i in real_rows(b)))
        assert len(set(choices)) == 5
        assert choices[0] != frozenset(range(90, 100))

    def test_none_by_default(self, loader_of):
        assert list(loader_of(numbered(5)).eval_batches()) == []


def real_rows(batch: Batch):
    return [int(row[0]) - 1 for row in batch.tokens[batch.segment_ids[:, 0] != PAD_SEGMENT_ID]]


class TestArguments:
    def test_too_few_rows_for_a_batch(self, loader_of):
        with pytest.raises(ValueError, match=r"got 2 rows for batch_size=3 .*use batch_size=2, a"):
            loader_of(numbered(2))

    def test_too_few_rows_left_by_the_held_out(self, loader_of):
        with pytest.raises(ValueError, match=r"got 2 rows .*8 rows held.*; use .*fewer eval_rows"):
            loader_of(numbered(10), eval_rows=8)
        with pytest.raises(ValueError, match=r"got 0 rows .*; use fewer eval_rows"):
            loader_of(numbered(10), eval_rows=100)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("batch_size", 0),
            ("seed", -1),
            ("seed", 2**32),
            ("eval_rows", -1),
            ("seq_len", 0),
            ("shuffle_window_rows", 0),
        ],
    )
    def test_value_out_of_range_is_named(self, loader_of, name, value):
        with pytest.raises(ValueError, match=rf"{name} must be .*got {value}"):
            loader_of(numbered(10), **{name: value})


class TestEvalData:
    @pytest.mark.parametrize("streaming", [False, True])
    def test_all_rows_of_other_data_and_all_of_the_data_for_training(self, loader_of, streaming):
        held = [chr(100 + i) * 4 for i in range(7)]
        loader = loader_of(numbered(20), eval_data=held, streaming=streaming, batch_size=4)
        batches = list(loader.eval_batches())
        assert loader.eval_rows == 7
        assert len(batches) == 2
        assert sorted(i for b in batches for i in real_rows(b)) == list(range(99, 106))
        assert sorted(row_ids(draw(loader, 5))) == list(range(20))
        assert loader.describe().endswith("7 rows held out")

    def test_some_rows_are_chosen_by_the_seed(self, loader_of):
        held = [chr(40 + i) * 4 for i in range(60)]

        def chosen(seed):
            loader = loader_of(numbered(20), eval_data=held, eval_rows=9, seed=seed)
            return [i for batch in loader.eval_batches() for i in real_rows(batch)]

        assert chosen(0) == chosen(0)
        assert len(set(chosen(0))) == len(chosen(1)) == 9
        assert sorted(chosen(0)) != sorted(chosen(1))

    def test_other_data_may_change_under_a_run(self, loader_of):
        state = loader_of(numbered(20), eval_data=["abcd"]).state()
        loader_of(numbered(20), eval_data=["abc", "def"]).restore(state)

    def test_more_rows_than_there_are_is_refused(self, loader_of):
        with pytest.raises(ValueError, match=r"got 1 rows of .* for eval_rows=2; use fewer"):
            loader_of(numbered(20), eval_data=["abcd"], eval_rows=2)

    def test_streaming_holds_no_rows_out_by_itself(self, loader_of):
        with pytest.raises(ValueError, match=r"got eval_rows=2 without eval_data; name held-out"):
            loader_of(numbered(20), eval_rows=2, streaming=True)


def tally(batches):
    """Tokens, padding and pieces, counted slot by slot."""
    real = np.concatenate([batch.segment_ids for batch in batches]) != PAD_SEGMENT_ID
    pieces = sum(len(set(row[row != PAD_SEGMENT_ID])) for b in batches for row in b.segment_ids)
    return {"tokens": int(real.sum()), "padded": int((~real).sum()), "pieces": pieces}


class TestReport:
    @pytest.mark.parametrize("streaming", [False, True])
    @pytest.mark.parametrize("packing", ["best_fit", "first_fit", "concatenate", "none"])
    def test_counts_are_those_of_the_batches_of_an_epoch(self, loader_of, streaming, packing):
        documents = ["x" * (7 * i % 100) for i in range(80)] + ["!"] * 3
        held = 0 if streaming else 5
        loader = loader_of(
            documents,
            seq_len=40,
            packing=packing,
            batch_size=1,
            eval_rows=held,
            streaming=streaming,
            shuffle_window_rows=1000,
        )
        first = next(loader)
        counts = loader.counts()
        train = tally([first, *draw(loader, counts["rows_train"] - 1)])
        evaluated = [b for b in loader.eval_batches() if (b.segment_ids != PAD_SEGMENT_ID).any()]
        assert counts["rows_eval"] == len(evaluated) == held
        assert counts["documents"] == 83
        assert counts["documents_empty"] == documents.count("")
        assert counts["tokens_in"] == counts["tokens_packed"] == sum(map(len, documents))
        assert counts["tokens_train"] == train["tokens"]
        total = {name: train[name] for name in train}
        for batch in evaluated:
            for name, value in tally([batch]).items():
                total[name] += value
        left_out = counts["rows_unlabelled"]
        assert counts["rows"] == counts["rows_train"] + held + left_out
        assert counts["tokens_packed"] == total["tokens"] + counts["tokens_unlabelled"]
        unlabelled_slots = 40 * left_out - counts["tokens_unlabelled"]
        assert counts["tokens_padded"] == total["padded"] + unlabelled_slots
        # A row is left out only if it holds nothing but one-token pieces, which here is one each.
        assert counts["pieces"] == total["pieces"] + counts["tokens_unlabelled"]
        assert f"{counts['tokens_padded']:,} padded" in loader.describe()

    def test_rows_in_which_nothing_can_be_predicted_are_left_out_and_reported(self, loader_of):
        loader = loader_of([*numbered(6), "!", "!"], batch_size=2)
        assert (loader.counts()["rows"], loader.counts()["rows_train"]) == (8, 6)
        assert "left out: 2 rows, 2 tokens, in which there is nothing" in loader.describe()
        assert ord("!") - 1 not in row_ids(draw(loader, 20))

    @pytest.mark.parametrize("streaming", [False, True])
    def test_nothing_but_one_token_documents_is_refused(self, loader_of, streaming):
        with pytest.raises(ValueError, match="must have a row to train on, got"):
            next(loader_of(["!"] * 64, seq_len=64, batch_size=1, streaming=streaming))

    def test_one_token_rest_of_a_split_document_still_counts(self, loader_of):
        loader = loader_of(["abcde"], batch_size=1)
        # "abcd" is followed by "e", which itself predicts nothing.
        assert (loader.counts()["rows"], loader.counts()["rows_train"]) == (2, 1)
        (batch,) = draw(loader, 1)
        assert batch.labels.tolist() == [list(b"bcde")]

    def test_description_counts_everything(self, loader_of):
        documents = ["x" * 100, "", *numbered(5)]
        loader = loader_of(
            documents, seq_len=40, packing="best_fit", batch_size=2, eval_rows=1, append_eos=True
        )
        tokenizer, *rest = loader.describe().splitlines()
        assert tokenizer.startswith("tokenizer byte")
        assert tokenizer.endswith("vocabulary 258")
        assert rest == [
            "7 documents, 126 tokens",
            "4 rows of 40 tokens: 126 tokens in 8 pieces, 34 padded (21.25%), 1 documents split",
            "left out: 1 empty documents",
            "3 rows for training, each seen once in 1.5 batches of 2",
            "1 rows held out",
        ]


class TestConversations:
    @pytest.mark.parametrize("streaming", [False, True])
    def test_only_the_assistants_turns_are_predicted(self, open_loader, tmp_path, streaming):
        turns = [("user", "What?"), ("assistant", "This."), ("user", "So?"), ("assistant", "Yes.")]
        messages = [{"role": role, "content": content} for role, content in turns]
        silent = [{"role": "user", "content": "Hello?"}]
        lines = [{"messages": messages}] * 2 + [{"messages": silent}]
        data = tmp_path / "chats.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        loader = open_loader(
            str(data),
            tokenizer="byte",
            seq_len=256,
            packing="none",
            batch_size=1,
            seed=0,
            streaming=streaming,
            cache_dir=str(tmp_path / "cache"),
        )
        (batch,) = draw(loader, 1)
        labels = batch.labels[batch.labels != IGNORE_LABEL]
        text = bytes(labels[labels < 256].astype(np.uint8)).decode()
        assert text.replace("<|im_end|>", "").split() in (["This.", "Yes."], ["This.Yes."])
        assert loader.counts()["rows_unlabelled"] == 1


class TestProcesses:
    @pytest.mark.parametrize("streaming", [False, True])
    def test_every_process_makes_the_same_global_batches(self, loader_of, tmp_path, streaming):
        documents = ["x" * (7 * i % 100 + 1) for i in range(80)]
        options = {"seq_len": 64, "packing": "first_fit", "batch_size": 4, "seed": 9}
        options |= {"streaming": streaming, "shuffle_window_rows": 8}
        loader = loader_of(documents, **options)
        (data,) = tmp_path.glob("*/data.jsonl")
        code = (
            "import sys, json, hashlib, itertools, dataclasses\n"
            "from farspan.data import make_loader\n"
            "loader = make_loader(sys.argv[1], tokenizer='byte', cache_dir=sys.argv[2],"
            " **json.loads(sys.argv[3]))\n"
            "digest = hashlib.blake2b()\n"
            "for batch in itertools.islice(loader, 30):\n"
            "    for array in dataclasses.astuple(batch): digest.update(array.tobytes())\n"
            "print(digest.hexdigest())\n"
            "loader.close()\n"
        )
        # A cache of its own: made in another process, from the same text.
        arguments = [str(data), str(tmp_path / "other"), json.dumps(options)]
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True
        )
        digest = hashlib.blake2b()
        for batch in draw(loader, 30):
            for array in dataclasses.astuple(batch):
                digest.update(array.tobytes())
        assert done.stdout.strip() == digest.hexdigest()


def test_cache_of_one_packing_serves_every_other(loader_of, tmp_path):
    documents = ["x" * (7 * i % 100 + 1) for i in range(80)]
    for options in ({"seq_len": 64}, {"seq_len": 48, "packing": "concatenate"}, {"seed": 4}):
        loader = loader_of(documents, **options)
        (batch,) = draw(loader, 1)
        assert batch.tokens.shape == (3, options.get("seq_len", 4))
        assert loader.counts()["tokens_packed"] == sum(map(len, documents))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_import_and_packing_need_neither_jax_nor_grain(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    code = (
        "import sys, farspan.data as data\n"
        "loader = data.make_loader(sys.argv[1], tokenizer='byte', seq_len=4, batch_size=1,"
        " seed=0, cache_dir=sys.argv[2])\n"
        "loader.describe()\n"
        "assert not {'jax', 'grain'} & set(sys.modules)\n"
    )
    paths = [str(tmp_path / "a.txt"), str(tmp_path / "cache")]
    subprocess.run([sys.executable, "-c", code, *paths], check=True)
