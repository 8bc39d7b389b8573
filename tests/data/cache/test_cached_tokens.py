"""The token cache: made once, for exactly these tokens, and whole or not there."""

import errno
import io
import logging
import os
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import PurePosixPath

import numpy as np
import pytest

from farspan.data import Document, Encoded, Encoder, Shard, Source, cached_tokens
from farspan.data.cache.cached_tokens import cache_key
from farspan.data.cache.encoding import encode_in_order
from farspan.data.reading.files import File

TEXTS = (b"one", b"", b"three", b"fourteen")


def shard(name="a", texts=TEXTS, version="1"):
    def read(skip):
        for number, text in enumerate(texts[skip:], start=skip):
            yield Document(f"{name}:{number}", text)

    file = File(PurePosixPath(name), name, 0, version, io.BytesIO)
    return Shard(name, (file,), read)


def source_of(*shards, name="fake"):
    return Source(name, shards or (shard(),))


class FakeEncoder(Encoder):
    """A token a byte; counts what it encodes."""

    def __init__(self, name="fake", vocab_size=300, scored=None, before=None):
        self.name, self.vocab_size = name, vocab_size
        self.scored, self.before = scored, before
        self.encoded = 0

    def encode_batch(self, records):
        if self.before:
            self.before()
        self.encoded += len(records)
        tokens = [np.frombuffer(record.text, np.uint8).astype(np.int32) for record in records]
        return [Encoded(each, self.scored(each) if self.scored else None) for each in tokens]


def tokens_of(cache, source=None, encoder=None, **options):
    return cached_tokens(
        source or source_of(), encoder or FakeEncoder(), cache_dir=str(cache), **options
    )


def texts(store):
    return [bytes(store.documents[i].astype(np.uint8)) for i in range(len(store.documents))]


def assert_whole(store, wanted=TEXTS):
    assert texts(store) == [text for text in wanted if text]
    assert store.empty_documents == sum(not text for text in wanted)
    counts = np.bincount(np.frombuffer(b"".join(wanted), np.uint8), minlength=300)
    assert (store.token_counts == counts).all()


def folders(cache):
    return sorted(path.name for path in cache.iterdir())


class TestContent:
    def test_holds_every_document_and_is_read_without_encoding_again(self, tmp_path):
        encoder = FakeEncoder()
        made = tokens_of(tmp_path, encoder=encoder)
        read = tokens_of(tmp_path, encoder=encoder)
        assert encoder.encoded == len(TEXTS)
        for store in (made, read):
            assert_whole(store)
            assert store.scored is None
            assert store.lengths.tolist() == [3, 5, 8]
        assert made.digest == read.digest
        assert isinstance(read.tokens.base, np.memmap)

    @pytest.mark.parametrize(("vocab_size", "width"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
    def test_ids_take_two_bytes_where_the_vocabulary_allows(self, tmp_path, vocab_size, width):
        store = tokens_of(tmp_path, encoder=FakeEncoder(vocab_size=vocab_size))
        assert store.tokens.dtype.itemsize == width
        assert texts(store) == [b"one", b"three", b"fourteen"]

    def test_scored_tokens_may_begin_with_any_document(self, tmp_path, monkeypatch):
        monkeypatch.setattr("farspan.data.cache.store_writer._CHUNK_TOKENS", 4)
        encoder = FakeEncoder(scored=lambda t: t != ord("e") if len(t) > 5 else None)
        store = tokens_of(tmp_path, encoder=encoder)
        assert store.token_counts[ord("e")] == b"onethree".count(b"e")  # none of "fourteen"
        assert store.documents_scored is not None
        assert [store.documents_scored[i].tolist() for i in range(3)] == [
            [True] * 3,
            [True] * 5,
            [c != "e" for c in "fourteen"],
        ]
        assert store.digest != tokens_of(tmp_path, encoder=FakeEncoder("plain")).digest

    def test_digest_tells_borders_apart(self, tmp_path):
        stores = [
            tokens_of(tmp_path, source_of(shard("a", parts, str(parts))))
            for parts in ((b"abc", b"d"), (b"ab", b"cd"), (b"abc", b"", b"d"))
        ]
        assert stores[0].digest != stores[1].digest
        assert stores[0].digest == stores[2].digest

    def test_no_text_at_all_is_refused(self, tmp_path):
        with pytest.raises(ValueError, match="must hold text, got 2 empty and no other in fake"):
            tokens_of(tmp_path, source_of(shard("a", (b"", b""))))
        assert folders(tmp_path) == []

    def test_id_outside_the_vocabulary_is_caught_and_nothing_is_left(self, tmp_path):
        with pytest.raises(ValueError, match=r"document a:0: token ids .* got 111 at index \(0,\)"):
            tokens_of(tmp_path, encoder=FakeEncoder(vocab_size=111))
        assert folders(tmp_path) == []

    def test_progress_says_how_far_it_is(self, tmp_path, monkeypatch):
        monkeypatch.setattr("farspan.data.progress._EVERY_SECONDS", 0.0)
        said: list[str] = []
        tokens_of(tmp_path, progress=said.append)
        assert said[-1] == "tokenising fake: 4 documents, 16 B, 16 tokens"


class TestKey:
    def test_what_changes_the_tokens_makes_another_cache_and_nothing_else_does(self, tmp_path):
        def key(source=None, encoder=None, text_field="text"):
            return cache_key(source or source_of(), encoder or FakeEncoder(), text_field)

        assert key(source_of(name="moved")) == key()
        others = [
            key(source_of(shard("b"))),
            key(source_of(shard(version="2"))),
            key(source_of(shard("a"), shard("b"))),
            key(encoder=FakeEncoder("other")),
            key(text_field="content"),
        ]
        assert key() not in others
        tokens_of(tmp_path)
        tokens_of(tmp_path, text_field="content")
        assert len(folders(tmp_path)) == 2


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "tokens cut short": lambda folder: truncate(folder / "tokens.bin"),
    "offsets of other data": lambda folder: (folder / "offsets.bin").write_bytes(bytes(32)),
    "no counts": lambda folder: (folder / "token_counts.bin").unlink(),
    "half a description": lambda folder: truncate(folder / "meta.json"),
    "another description": lambda folder: (folder / "meta.json").write_text("[1]"),
    "no description": lambda folder: (folder / "meta.json").unlink(),
}


class TestFaults:
    @pytest.mark.parametrize("damage", DAMAGES)
    def test_damaged_cache_is_noticed_and_made_anew(self, tmp_path, caplog, damage):
        tokens_of(tmp_path)
        (folder,) = tmp_path.iterdir()
        DAMAGES[damage](folder)
        with caplog.at_level(logging.WARNING):
            assert_whole(tokens_of(tmp_path))
        assert "is damaged" in caplog.text
        assert "is made anew" in caplog.text
        encoder = FakeEncoder()
        assert_whole(tokens_of(tmp_path, encoder=encoder))
        assert encoder.encoded == 0
        assert folders(tmp_path) == [folder.name]

    def test_killed_builder_leaves_nothing_that_is_used_and_its_rest_is_removed(self, tmp_path):
        text = tmp_path / "a.txt"
        text.write_text("one")
        code = (
            "import os, sys\n"
            "from farspan.data import cached_tokens, make_encoder, open_source\n"
            "from farspan.data.cache.store_writer import StoreWriter\n"
            "StoreWriter.finish = lambda self: os._exit(9)\n"
            "cached_tokens(open_source(sys.argv[1]), make_encoder('byte'), cache_dir=sys.argv[2])\n"
        )
        cache = tmp_path / "cache"
        ended = subprocess.run([sys.executable, "-c", code, str(text), str(cache)], check=False)
        assert ended.returncode == 9
        (left,) = folders(cache)
        assert left.startswith("building-")
        assert_whole(tokens_of(cache))
        assert len(folders(cache)) == 1
        assert left not in folders(cache)

    def test_rests_of_a_day_ago_go_and_what_is_in_use_stays(self, tmp_path):
        for name in ("building-elsewhere-1-old", "building-elsewhere-1-new"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "tokens.bin").write_bytes(b"..")
        long_ago = time.time() - 25 * 3600
        for path in (tmp_path / "building-elsewhere-1-old" / "tokens.bin", tmp_path):
            os.utime(path, (long_ago, long_ago))
        os.utime(tmp_path / "building-elsewhere-1-old", (long_ago, long_ago))
        os.utime(tmp_path / "building-elsewhere-1-new", (long_ago, long_ago))
        tokens_of(tmp_path)
        assert len(folders(tmp_path)) == 2
        unfinished = [name for name in folders(tmp_path) if name.startswith("building")]
        assert unfinished == ["building-elsewhere-1-new"]

    def test_many_builders_at_once_end_with_one_cache(self, tmp_path):
        together = threading.Barrier(4)
        found: list[object] = []

        def build():
            found.append(tokens_of(tmp_path, encoder=FakeEncoder(before=together.wait)))

        threads = [threading.Thread(target=build) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        for store in found:
            assert_whole(store)
        assert len(folders(tmp_path)) == 1

    def test_folder_that_cannot_be_made_is_named_with_the_remedy(self, tmp_path):
        (tmp_path / "file").write_text("no folder")
        with pytest.raises(OSError, match=r"cache: .* got Not a directory in .*--cache-dir"):
            tokens_of(tmp_path / "file" / "cache")

    def test_full_disk_is_named_with_the_remedy_and_nothing_is_left(self, tmp_path, monkeypatch):
        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match=r"got No space left on device in .*free some space"):
            tokens_of(tmp_path)
        assert folders(tmp_path) == []

    def test_error_of_the_data_is_passed_on_unchanged(self, tmp_path):
        def read(_):
            yield Document("a", b"one")
            raise OSError("the disk of the data")

        source = source_of(Shard("a", (), read))
        with pytest.raises(OSError, match=r"^the disk of the data$"):
            tokens_of(tmp_path, source)
        assert folders(tmp_path) == []


class TestEncodeInOrder:
    def test_order_is_kept_and_little_is_read_ahead(self):
        read = 0

        def records():
            nonlocal read
            for number in range(100_000):
                read += 1
                yield number, Document(str(number), b"x" * (number % 5))

        slow = FakeEncoder(before=lambda: time.sleep(0.001 * (threading.get_ident() % 3)))
        stream = encode_in_order(records(), slow)
        found = [(place, len(encoded.tokens)) for place, _, encoded in islice(stream, 5_000)]
        stream.close()
        assert found == [(number, number % 5) for number in range(5_000)]
        assert read < 5_000 + 10 * 256
