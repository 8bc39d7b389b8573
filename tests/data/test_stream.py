"""Streaming: every record once an epoch, bounded memory, and an exact place to go on from."""

import io
import itertools
import json
import os
import threading
from collections import Counter
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.data import Batch, Document, LengthWeights, Shard, Source, make_encoder, make_loader
from farspan.data.reading.files import File
from farspan.data.windows import Place, WindowReader, WindowSettings
from farspan.types import PAD_SEGMENT_ID

SHARDS = 4


def write_shards(folder, documents):
    """Deals documents out to JSON lines files, in turn."""
    folder.mkdir(exist_ok=True)
    for number in range(SHARDS):
        lines = [json.dumps({"text": text}) for text in documents[number::SHARDS]]
        (folder / f"{number}.jsonl").write_text("\n".join(lines))
    return str(folder)


def stream_of(folder, **options):
    defaults = {
        "tokenizer": "byte",
        "seq_len": 4,
        "packing": "none",
        "batch_size": 3,
        "seed": 0,
        "shuffle_window_rows": 16,
    }
    return make_loader(str(folder), streaming=True, **(defaults | options))


@pytest.fixture
def numbered(tmp_path):
    """100 documents that tell which they are: four times the same character."""
    return write_shards(tmp_path / "data", [chr(i + 1) * 4 for i in range(100)])


def ids_of(batches):
    return [int(row[0]) - 1 for batch in batches for row in batch.tokens]


def draw(loader, batches):
    return list(itertools.islice(loader, batches))


class TestEpochs:
    def test_each_record_once_an_epoch_in_another_order_each_time(self, numbered):
        loader = stream_of(numbered, batch_size=4)
        ids = ids_of(draw(loader, 75))
        loader.close()
        epochs = [ids[start : start + 100] for start in (0, 100, 200)]
        assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        assert list(range(100)) not in epochs
        # The order of shards differs as well: the first window is not of the same one always.
        assert len({tuple(sorted(i % SHARDS for i in epoch[:16])) for epoch in epochs}) > 1

    def test_same_seed_same_batches_other_seed_other_order(self, numbered):
        orders: list[list[int]] = []
        for seed in (3, 3, 4):
            loader = stream_of(numbered, seed=seed)
            orders.append(ids_of(draw(loader, 66)))
            loader.close()
        assert orders[0] == orders[1] != orders[2]

    @settings(max_examples=15)
    @given(
        lengths=st.lists(st.integers(0, 30), min_size=SHARDS, max_size=25),
        seq_len=st.integers(2, 12),
        window=st.integers(1, 5),
        packing=st.sampled_from(["best_fit", "first_fit", "concatenate", "none"]),
        seed=st.integers(0, 9),
    )
    def test_every_token_is_in_one_row_an_epoch(self, lengths, seq_len, window, packing, seed):
        source, texts = source_of(lengths)
        reader = WindowReader(
            source,
            make_encoder("byte"),
            WindowSettings(seq_len, packing, window, seed, LengthWeights()),
        )
        place = Place()
        for epoch in range(2):
            seen: Counter[bytes] = Counter()
            while place.epoch == epoch:
                found = reader.read(place)
                assert found.place == place
                assert len(found.order) == found.counts.rows_train
                for row in found.rows:
                    assert sum(piece.length for piece in row) <= seq_len
                    for piece in row:
                        seen[bytes(found.tokens[piece.document].astype(np.uint8))] += piece.length
                place = found.after
            assert seen == {text: len(text) for text in texts if text}

    def test_document_longer_than_a_window_is_kept_whole(self, tmp_path):
        folder = write_shards(tmp_path / "data", ["a" * 50, "b" * 3, "c" * 4, "d" * 2])
        loader = stream_of(folder, shuffle_window_rows=2, batch_size=1)
        rows = [row for batch in draw(loader, 16) for row in batch.tokens]
        assert sum(int((row == ord("a")).sum()) for row in rows) == 50
        loader.close()


def source_of(lengths):
    """Documents of these lengths, told apart by their letters, dealt out to shards."""
    texts = [bytes([i + 1]) * length for i, length in enumerate(lengths)]

    def shard(number):
        mine = [Document(str(number), text) for text in texts[number::SHARDS]]
        file = File(PurePosixPath(str(number)), str(number), 0, "", io.BytesIO)
        return Shard(str(number), (file,), lambda skip: iter(mine[skip:]))

    return Source("fake", tuple(shard(number) for number in range(SHARDS))), texts


class TestResume:
    @pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
    def test_after_every_batch_of_two_epochs(self, tmp_path, packing):
        documents = [chr(i + 1) * (i * 7 % 19) for i in range(60)]
        folder = write_shards(tmp_path / "data", documents)
        options = {"packing": packing, "seq_len": 8, "shuffle_window_rows": 5, "seed": 2}
        loader = stream_of(folder, **options)
        states, batches = [loader.state()], []
        while states[-1]["stream"]["sources"][0]["epoch"] < 2:
            batches.append(next(loader))
            states.append(json.loads(json.dumps(loader.state())))
        counts = loader.counts()
        after = draw(loader, 3)
        loader.close()
        assert len(json.dumps(states[-1])) < 2000
        places = {tuple(s["stream"]["sources"][0][k] for k in ("epoch", "shard")) for s in states}
        assert len(places) > SHARDS  # borders of shards and epochs lie between
        for taken, state in enumerate(states):
            other = stream_of(folder, **options)
            draw(other, taken % 3)
            other.restore(state)
            assert other.state() == state
            for expected in (batches + after)[taken : taken + 3]:
                found = next(other)
                np.testing.assert_array_equal(found.tokens, expected.tokens)
                np.testing.assert_array_equal(found.labels, expected.labels)
            other.close()
        other = stream_of(folder, **options)
        other.restore(states[-2])
        next(other)
        assert other.counts() == counts
        other.close()

    def test_data_may_move_but_not_change(self, numbered, tmp_path):
        loader = stream_of(numbered)
        draw(loader, 5)
        state = loader.state()
        expected = ids_of(draw(loader, 9))
        loader.close()
        moved = tmp_path / "moved"
        Path(numbered).rename(moved)
        other = stream_of(moved)
        other.restore(state)
        assert ids_of(draw(other, 9)) == expected
        other.close()
        with (moved / "1.jsonl").open("a") as file:
            file.write('\n{"text": "more"}')
        with pytest.raises(ValueError, match=r"another data \(saved"):
            stream_of(moved).restore(state)

    def test_other_text_behind_the_same_sizes_and_times_is_noticed(self, tmp_path):
        texts = [f"{i:04d}" for i in range(100)]
        folder = write_shards(tmp_path / "data", texts)
        loader = stream_of(folder)
        draw(loader, 2)
        state = loader.state()
        loader.close()
        times = [(path, path.stat().st_mtime_ns) for path in (tmp_path / "data").iterdir()]
        write_shards(tmp_path / "data", [text[::-1] for text in texts])
        for path, changed in times:
            os.utime(path, ns=(changed, changed))
        other = stream_of(folder)
        other.restore(state)
        with pytest.raises(ValueError, match=r"got other text in .* at Place\(epoch=0, window=0"):
            next(other)
        other.close()

    def test_state_of_another_window_is_refused(self, numbered):
        state = stream_of(numbered).state()
        with pytest.raises(ValueError, match=r"shuffle_window_rows \(saved 16, now 17\)"):
            stream_of(numbered, shuffle_window_rows=17).restore(state)


def drain(loader, into):
    for batch in loader:
        into.append(batch)


class TestWork:
    def test_little_is_read_before_the_first_batch(self):
        read = 0

        def records(skip):
            nonlocal read
            for number in itertools.count(skip):
                read += 1
                yield Document(str(number), b"x" * 1000)

        source = Source("endless", (Shard("endless", (), records),))
        settings = WindowSettings(100, "best_fit", 50, 0, LengthWeights())
        reader = WindowReader(source, make_encoder("byte"), settings)
        window = reader.read(Place())
        assert len(window.tokens) == 5
        assert window.after == Place(0, 1, 0, 5)
        assert read <= 5 + 256 * (min(8, os.cpu_count() or 1) + 1)
        reader.close()

    def test_error_of_a_later_window_comes_after_the_batches_before_it(self, tmp_path):
        lines = [json.dumps({"text": chr(i + 1) * 4}) for i in range(40)]
        (tmp_path / "data.jsonl").write_text("\n".join([*lines, "{", *lines]))
        loader = stream_of(tmp_path / "data.jsonl", batch_size=4)
        drawn: list[Batch] = []
        with pytest.raises(ValueError, match=r"data.jsonl:41: .*invalid JSON"):
            drain(loader, drawn)
        with pytest.raises(ValueError, match="invalid JSON"):
            next(loader)
        assert len(drawn) == 8  # two windows of 16 rows
        loader.close()

    def test_close_ends_the_threads(self, numbered):
        before = set(threading.enumerate())
        loader = stream_of(numbered)
        next(loader)
        assert {t.name for t in set(threading.enumerate()) - before} >= {"farspan-stream_0"}
        loader.close()
        assert set(threading.enumerate()) <= before

    def test_rows_of_a_batch_may_come_from_two_windows_and_are_full(self, numbered):
        loader = stream_of(numbered, batch_size=7)
        batches = draw(loader, 30)
        assert all((batch.segment_ids != PAD_SEGMENT_ID).all() for batch in batches)
        assert loader.unigram_loss is None
        assert loader.vocab_size == 258
        assert list(loader.eval_batches()) == []
        loader.close()
