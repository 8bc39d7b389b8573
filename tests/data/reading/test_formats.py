"""Every kind of file gives the same records, from any place on, and never fewer than it holds."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter

from farspan.data.document import Conversation, Document
from farspan.data.reading.formats import READERS
from farspan.data.reading.sources import open_source

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hö"}]
ROWS: list[dict[str, Any]] = [{"text": f"text {n} é", "id": n} for n in range(70)]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(lines(rows))


def jsonl_gz(path: Path, rows: list[dict[str, Any]]) -> None:
    # Two members, as `cat a.gz b.gz` makes.
    path.write_bytes(gzip.compress(lines(rows[:9])) + gzip.compress(lines(rows[9:])))


def jsonl_zst(path: Path, rows: list[dict[str, Any]]) -> None:
    pack = zstandard.ZstdCompressor().compress
    skippable = b"\x50\x2a\x4d\x18\x04\0\0\0pzst"
    path.write_bytes(skippable + pack(lines(rows[:9])) + pack(lines(rows[9:])))


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=33)


def arrow_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with path.open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def arrow_file(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with path.open("wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def array_record(path: Path, rows: list[dict[str, Any]]) -> None:
    write_records(path, [json.dumps(row).encode() for row in rows])


def write_records(path: Path, records: list[bytes]) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:4")
    for record in records:
        writer.write(record)
    writer.close()


WRITERS = {
    "a.jsonl": jsonl,
    "a.jsonl.gz": jsonl_gz,
    "a.jsonl.zst": jsonl_zst,
    "a.parquet": parquet,
    "a.arrow": arrow_stream,
    "b.arrow": arrow_file,
    "a.array_record": array_record,
    "a.arrayrecord": array_record,
}
every_format = pytest.mark.parametrize("name", WRITERS)


def shard(path: Path, **settings: str):
    (found,) = open_source(str(path), **settings).shards
    return found


def read(path: Path, **settings: str):
    return list(shard(path, **settings).records())


def test_all_formats_are_tried_here():
    tried = {name[1:] for name in WRITERS}
    assert set(READERS) - tried == {".txt", ".md", ".py"}


@every_format
def test_rows_are_documents_and_skipping_equals_reading_past(tmp_path, name):
    WRITERS[name](tmp_path / name, ROWS)
    expected = [
        Document(f"{name}:{n}", row["text"].encode()) for n, row in enumerate(ROWS, start=1)
    ]
    assert read(tmp_path / name) == expected
    for skip in (1, 6, 7, 32, 33, 34, 66, 69, 70, 71):
        assert list(shard(tmp_path / name).records(skip)) == expected[skip:]


@every_format
def test_rows_with_messages_are_conversations(tmp_path, name):
    rows = [{"messages": CHAT, "tools": [{"name": "f"}]}, {"messages": CHAT, "tools": []}]
    WRITERS[name](tmp_path / name, rows)
    with_tools, without = read(tmp_path / name)
    assert with_tools == Conversation(f"{name}:1", tuple(CHAT), ({"name": "f"},))
    assert without == Conversation(f"{name}:2", tuple(CHAT), None)


@every_format
def test_text_field_is_named_or_what_there_is_is_said(tmp_path, name):
    WRITERS[name](tmp_path / name, [{"body": "x", "id": 1}])
    assert read(tmp_path / name, text_field="body") == [Document(f"{name}:1", b"x")]
    with pytest.raises(ValueError, match=r"'body', 'id'.*; set text_field") as error:
        read(tmp_path / name)
    assert str(tmp_path / name) in str(error.value)


@every_format
def test_text_that_is_none_is_refused_with_its_row(tmp_path, name):
    WRITERS[name](tmp_path / name, [{"text": "x"}, {"text": None}])
    with pytest.raises(ValueError, match=rf"{name}:2: .*got null in \"text\"; write it"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "a.jsonl"])
def test_file_cut_anywhere_is_an_error_and_never_a_shorter_one(tmp_path, name):
    rows = [{"text": f"{n * n * 2654435761}" * 40} for n in range(200)]
    WRITERS[name](tmp_path / name, rows)
    whole = (tmp_path / name).read_bytes()
    cuts = [1, 8, len(whole) // 3, len(whole) // 2, len(whole) - 20, len(whole) - 3]
    # Where a stream of Arrow may stop without a sign: between two batches.
    cuts += [len(whole) - place for place in find_all(whole, b"\xff\xff\xff\xff")][-5:]
    for cut in {*cuts, len(whole)} - {0}:
        (tmp_path / name).write_bytes(whole[:-cut])
        with pytest.raises(ValueError, match="must be whole, got a damaged or cut file") as error:
            read(tmp_path / name)
        assert str(tmp_path / name) in str(error.value)


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "a.jsonl"])
def test_file_of_another_kind_is_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(ValueError, match="must be whole, got a damaged or cut file"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "b.arrow", "a.jsonl.zst", "a.jsonl.gz"])
def test_remote_file_reads_like_a_local_one(tmp_path, name):
    import fsspec

    WRITERS[name](tmp_path / name, ROWS)
    files = fsspec.filesystem("memory")
    files.pipe(f"/formats/{name}", (tmp_path / name).read_bytes())
    (remote,) = open_source(f"memory://formats/{name}").shards
    assert list(remote.records(5)) == read(tmp_path / name)[5:]
    files.rm("/formats", recursive=True)


def test_remote_array_record_is_refused():
    import fsspec

    fsspec.filesystem("memory").pipe("/formats/a.array_record", b"x")
    (remote,) = open_source("memory://formats/a.array_record").shards
    with pytest.raises(NotImplementedError, match=r"must be on this machine.*copy it first"):
        next(remote.records())
    fsspec.filesystem("memory").rm("/formats", recursive=True)


class TestTables:
    def test_keys_that_only_other_messages_have_are_absent(self, tmp_path):
        call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
        parquet(tmp_path / "a.parquet", [{"messages": [CHAT[0], call]}, {"messages": CHAT}])
        first, second = read(tmp_path / "a.parquet")
        assert first.messages == (CHAT[0], call)
        assert second.messages == tuple(CHAT)

    def test_groups_that_are_skipped_are_not_read(self, tmp_path):
        parquet(tmp_path / "a.parquet", ROWS)
        raw = bytearray((tmp_path / "a.parquet").read_bytes())
        raw[4:200] = b"\xff" * 196  # in the first of three groups
        (tmp_path / "a.parquet").write_bytes(raw)
        assert len(list(shard(tmp_path / "a.parquet").records(33))) == 37
        with pytest.raises(ValueError, match="damaged"):
            list(shard(tmp_path / "a.parquet").records(32))

    def test_invalid_utf8_is_refused_with_row_and_offset(self, tmp_path):
        text = pa.array([b"fine", b"b\xffd"]).cast(pa.binary()).view(pa.string())
        pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
        with pytest.raises(ValueError, match=r"a\.parquet:2 must be UTF-8.*0xff at offset 1"):
            read(tmp_path / "a.parquet")


def example(text: bytes) -> bytes:
    """A `tf.train.Example` of the text and an integer `id`."""

    def field(number: int, content: bytes) -> bytes:
        size = len(content)
        head = [size] if size < 128 else [size & 127 | 128, size >> 7]
        return bytes([number << 3 | 2, *head]) + content

    words = field(1, b"text") + field(2, field(1, field(1, text)))
    number = field(1, b"id") + field(2, field(3, b"\x0a\x01\x07"))
    return field(1, field(1, words) + field(1, number))


class TestArrayRecords:
    def test_text_is_taken_as_it_is(self, tmp_path):
        write_records(tmp_path / "a.array_record", [b"plain", b'{"text": "no line of JSON"}', b""])
        texts = [record.text for record in read(tmp_path / "a.array_record")]
        assert texts == [b"plain", b'{"text": "no line of JSON"}', b""]

    def test_examples_of_tensorflow_are_read(self, tmp_path):
        write_records(tmp_path / "a.array_record", [example(b"short"), example(b"long" * 99)])
        assert [r.text for r in read(tmp_path / "a.array_record")] == [b"short", b"long" * 99]
        with pytest.raises(ValueError, match=r"got the fields \['id', 'text'\]"):
            read(tmp_path / "a.array_record", text_field="body")

    @pytest.mark.parametrize(
        ("records", "words"),
        [
            ([b'{"text": "x"}', b"plain"], "record:2: each record.*invalid JSON"),
            ([b"plain", b"\n\xff"], "record:2 must be UTF-8"),
            ([b'{"body": "x"}'], r"got the fields \['body'\]"),
            ([example(b"x"), b"plain"], "record:2: each record must be a tf"),
        ],
    )
    def test_records_of_different_kinds_are_refused(self, tmp_path, records, words):
        write_records(tmp_path / "a.array_record", records)
        with pytest.raises(ValueError, match=words):
            read(tmp_path / "a.array_record")

    def test_empty_file_has_no_records(self, tmp_path):
        write_records(tmp_path / "a.array_record", [])
        assert read(tmp_path / "a.array_record") == []


class TestSavedDatasets:
    def test_rows_are_read_in_the_order_of_its_state(self, tmp_path):
        self._save(tmp_path, {"data-1.arrow": ["c", "d"], "data-0.arrow": ["a"]})
        arrow_stream(tmp_path / "cache-7.arrow", [{"text": "no part of it"}])
        assert [d.text for d in open_source(str(tmp_path)).records()] == [b"c", b"d", b"a"]

    def test_missing_part_is_an_error(self, tmp_path):
        self._save(tmp_path, {"data-0.arrow": ["a"], "data-1.arrow": ["b"]})
        (tmp_path / "data-1.arrow").unlink()
        with pytest.raises(ValueError, match=r"got none called data-1\.arrow there"):
            open_source(str(tmp_path))

    def test_several_splits_are_named(self, tmp_path):
        (tmp_path / "sets").mkdir()
        (tmp_path / "sets/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        for split in ("train", "test"):
            self._save(tmp_path / "sets" / split, {"data-0.arrow": [split]})
        for folder in (tmp_path, tmp_path / "sets"):
            with pytest.raises(ValueError, match=r"got train, test in .*name one of.*sets/train"):
                open_source(str(folder))
        assert read(tmp_path / "sets/train")[0].text == b"train"

    @staticmethod
    def _save(folder: Path, parts: dict[str, list[str]]) -> None:
        folder.mkdir(exist_ok=True)
        for name, texts in parts.items():
            arrow_stream(folder / name, [{"text": text} for text in texts])
        state = {"_data_files": [{"filename": name} for name in parts], "_split": None}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text("{}")


def test_lines_are_read_one_at_a_time(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    jsonl(path, [{"text": "x" * 100_000} for _ in range(100)])
    taken = 0
    plain_open = Path.open

    class Counting(io.FileIO):
        def readinto(self, buffer: Any, /) -> int | None:
            nonlocal taken
            read = super().readinto(buffer)
            taken += read or 0
            return read

    def counting_open(self: Path, mode: str = "r", *rest: Any):
        if self == path:
            return io.BufferedReader(Counting(str(self)))
        return plain_open(self, mode, *rest)

    monkeypatch.setattr(Path, "open", counting_open)
    records = shard(path).records()
    next(records)
    assert taken < 500_000 < path.stat().st_size


def find_all(raw: bytes, part: bytes) -> list[int]:
    return [n for n in range(len(raw)) if raw.startswith(part, n)]
