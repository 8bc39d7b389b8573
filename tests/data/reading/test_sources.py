"""What becomes a document, in which order, and what is refused or reported."""

import codecs
import json
import logging
import os
import re
from pathlib import Path

import pytest

from farspan.data.document import Document
from farspan.data.reading.sources import open_source


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def read(data: str | Path, **settings: str) -> list[Document]:
    source = open_source(str(data), **settings)
    assert len({shard.name for shard in source.shards}) == len(source.shards)
    return list(source.records())


def texts(data: str | Path) -> dict[str, bytes]:
    documents = read(data)
    assert len({document.name for document in documents}) == len(documents)
    return {document.name: document.text for document in documents}


@pytest.fixture(scope="module")
def stdlib() -> dict[str, bytes]:
    return {document.name: document.text for document in read("stdlib")}


class TestStdlib:
    def test_package_is_one_document_with_a_header_for_each_file_in_sorted_order(self, stdlib):
        lines = stdlib["asyncio"].decode().splitlines()
        headers = [line for line in lines if line.startswith("# file: asyncio/")]
        assert headers[:2] == ["# file: asyncio/__init__.py", "# file: asyncio/__main__.py"]
        assert "# file: asyncio/base_events.py" in headers
        assert headers == sorted(headers)
        assert lines[0] == headers[0]

    def test_top_level_module_is_its_own_document_verbatim(self, stdlib):
        assert stdlib["argparse.py"] == Path(__import__("argparse").__file__).read_bytes()

    def test_leaves_out_tests_and_installed_packages(self, stdlib):
        assert {"json", "unittest", "os.py", "idlelib"} <= stdlib.keys()
        left_out = {"test", "site-packages", "ensurepip", "turtledemo", "lib-dynload"}
        assert not left_out & stdlib.keys()
        headers = re.findall(rb"^# file: (.*)$", b"\n".join(stdlib.values()), re.MULTILINE)
        parts = {part for header in headers for part in header.split(b"/")}
        assert b"base_events.py" in parts
        assert not {b"test", b"tests", b"idle_test", b"__pycache__"} & parts

    def test_is_large_and_the_same_every_time(self, stdlib):
        assert sum(len(text) for text in stdlib.values()) > 5_000_000
        assert list(stdlib.items()) == [(d.name, d.text) for d in read("stdlib")]


class TestFiles:
    @pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.TXT"])
    def test_text_file_is_one_document_verbatim(self, tmp_path, name):
        write(tmp_path, {name: "héllo\r\nworld"})
        assert texts(tmp_path / name) == {name: "héllo\r\nworld".encode()}

    def test_byte_order_mark_is_no_text(self, tmp_path):
        write(
            tmp_path,
            {
                "a.txt": codecs.BOM_UTF8 + b"x",
                "b.jsonl": codecs.BOM_UTF8 + b'{"text":"y"}',
                "c.jsonl": codecs.BOM_UTF8 + b'\n{"text":"z"}',
            },
        )
        assert texts(tmp_path) == {"a.txt": b"x", "b.jsonl:1": b"y", "c.jsonl:2": b"z"}
        skipped = open_source(str(tmp_path / "c.jsonl")).shards[0].records(1)
        assert list(skipped) == []

    def test_jsonl_is_a_document_a_line_and_blank_lines_are_ignored(self, tmp_path):
        lines = [{"text": "one\ntwo"}, {"id": 7, "text": "\u2028 three"}]
        content = "\n".join(["", json.dumps(lines[0]), "  ", json.dumps(lines[1]), "", ""])
        write(tmp_path, {"a.jsonl": content})
        assert texts(tmp_path / "a.jsonl") == {
            "a.jsonl:2": b"one\ntwo",
            "a.jsonl:4": "\u2028 three".encode(),
        }

    def test_unescaped_line_separator_does_not_end_a_jsonl_line(self, tmp_path):
        write(tmp_path, {"a.jsonl": '{"text": "one\u2028two\x85three"}\r\n'})
        assert texts(tmp_path / "a.jsonl") == {"a.jsonl:1": "one\u2028two\x85three".encode()}

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ("{", ["invalid JSON"]),
            ("[" * 100_000, ["invalid JSON"]),
            ('["text"]', ["a list"]),
            ("3", ["a number"]),
            ("null", ["null"]),
            ('{"content": "x"}', ["['content']", "set text_field"]),
            ('{"text": 3}', ["a number"]),
            ('{"text": null}', ["null"]),
            ('{"text": ["x"]}', ["a list"]),
            ('{"text": "\\u0000"}', ["NUL"]),
            ('{"text": "ab\\ud800"}', ["surrogate", "character 2"]),
        ],
    )
    def test_bad_jsonl_line_is_named(self, tmp_path, line, words):
        write(tmp_path, {"a.jsonl": f'{{"text": "fine"}}\n\n{line}\n'})
        with pytest.raises(ValueError, match="must be a JSON object") as error:
            read(tmp_path / "a.jsonl")
        for word in [f"{tmp_path / 'a.jsonl'}:3: ", *words]:
            assert word in str(error.value)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"abc\0def", "a NUL byte at offset 3"),
            (b"ab\xffc", "0xff at offset 2"),
            (b"abcd\xc3", "0xc3 at offset 4"),
            ("wide".encode("utf-16"), "NUL byte at offset 3"),
        ],
    )
    @pytest.mark.parametrize("suffix", ["txt", "py", "jsonl"])
    def test_binary_content_is_refused_with_its_offset(self, tmp_path, content, words, suffix):
        write(tmp_path, {f"a.{suffix}": content})
        with pytest.raises(ValueError, match="convert the file to UTF-8") as error:
            read(tmp_path / f"a.{suffix}")
        assert words in str(error.value)
        assert f"a.{suffix}" in str(error.value)

    def test_unsupported_type_is_refused(self, tmp_path):
        write(tmp_path, {"a.json": "{}"})
        with pytest.raises(ValueError, match=r"must be \.txt, \.md, \.py, \.jsonl.*a\.json"):
            read(tmp_path / "a.json")

    def test_device_file_is_refused(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.txt")
        with pytest.raises(ValueError, match=r"pipe\.txt must be a regular file"):
            read(tmp_path / "pipe.txt")

    def test_home_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        write(tmp_path, {"a.txt": "x"})
        assert read("~/a.txt")[0].text == b"x"


class TestMissing:
    def test_names_the_nearest_sibling(self, tmp_path):
        write(tmp_path, {"corpus.txt": "x", "other.txt": "x"})
        with pytest.raises(FileNotFoundError, match=r"did you mean .*corpus\.txt"):
            read(tmp_path / "corpsu.txt")

    def test_names_the_folder_that_is_missing(self, tmp_path):
        write(tmp_path, {"books/a.txt": "x"})
        with pytest.raises(FileNotFoundError, match=r"\(boks is not in .*did you mean .*/books"):
            read(tmp_path / "boks" / "deep" / "a.txt")

    def test_path_below_a_file(self, tmp_path):
        write(tmp_path, {"a.txt": "x"})
        with pytest.raises(FileNotFoundError, match="existing path"):
            read(tmp_path / "a.txt" / "b.txt")

    def test_misspelt_stdlib(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(FileNotFoundError, match='did you mean "stdlib"'):
            read("sdtlib")

    @pytest.mark.parametrize("data", ["", "  "])
    def test_empty_name_is_not_the_working_folder(self, data):
        with pytest.raises(ValueError, match="name a file or folder"):
            read(data)

    def test_broken_link(self, tmp_path):
        (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
        with pytest.raises(
            FileNotFoundError, match=r"a\.txt must lead to a file, got a broken link"
        ):
            read(tmp_path)


class TestFolder:
    def test_python_below_a_subfolder_is_one_document_and_other_files_are_their_own(self, tmp_path):
        write(
            tmp_path,
            {
                "pkg/b.py": "b = 1",
                "pkg/a.py": "a = 1\n",
                "pkg/sub/c.py": "c = 1\n",
                "pkg/empty.py": "",
                "pkg/notes.txt": "notes",
                "top.py": "top = 1",
                "read.md": "# title",
                "z/chats.jsonl": '{"text": "hi"}\n{"text": "ho"}',
            },
        )
        package = """\
# file: pkg/a.py
a = 1
# file: pkg/b.py
b = 1
# file: pkg/empty.py
# file: pkg/sub/c.py
c = 1
"""
        assert list(texts(tmp_path).items()) == [
            ("pkg", package.encode()),
            ("pkg/notes.txt", b"notes"),
            ("read.md", b"# title"),
            ("top.py", b"top = 1"),
            ("z/chats.jsonl:1", b"hi"),
            ("z/chats.jsonl:2", b"ho"),
        ]

    def test_order_does_not_depend_on_the_file_system(self, tmp_path):
        names = ["b/2.txt", "a.txt", "b/10.txt", "b.txt", "B.txt", "b/a/1.txt"]
        write(tmp_path / "x", dict.fromkeys(names, "t"))
        write(tmp_path / "y", dict.fromkeys(reversed(names), "t"))
        expected = ["B.txt", "a.txt", "b/10.txt", "b/2.txt", "b/a/1.txt", "b.txt"]
        assert list(texts(tmp_path / "x")) == list(texts(tmp_path / "y")) == expected

    def test_hidden_entries_and_caches_are_left_out(self, tmp_path):
        write(
            tmp_path,
            {"a.txt": "x", ".git/b.txt": b"\0", "p/__pycache__/c.py": b"\0", ".d.txt": b"\0"},
        )
        assert texts(tmp_path) == {"a.txt": b"x"}

    def test_links_are_followed_once_even_in_a_loop(self, tmp_path, caplog):
        write(tmp_path, {"data/a.txt": "x", "far/b.txt": "y"})
        (tmp_path / "data" / "far").symlink_to(tmp_path / "far")
        (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
        (tmp_path / "far" / "back").symlink_to(tmp_path / "far")
        with caplog.at_level(logging.WARNING):
            assert texts(tmp_path / "data") == {"a.txt": b"x", "far/b.txt": b"y"}
        assert "read once, though linked again: far/back, loop" in caplog.text

    def test_empty_documents_keep_their_places(self, tmp_path):
        files = {
            "a.txt": "x",
            "b.txt": "",
            "c.jsonl": '{"text": ""}\n{"text": "y"}',
            "d.jsonl": "\n",
            "pkg/__init__.py": "",
        }
        write(tmp_path, files)
        empty = {"b.txt": b"", "c.jsonl:1": b"", "pkg": b""}
        assert texts(tmp_path) == {"a.txt": b"x", "c.jsonl:2": b"y", **empty}

    def test_files_of_other_types_are_left_out_and_counted(self, tmp_path, caplog):
        write(tmp_path, {"a.txt": "x", "b.png": b"\0", "c.png": b"\0", "Makefile": "all:"})
        with caplog.at_level(logging.WARNING):
            assert texts(tmp_path) == {"a.txt": b"x"}
        assert "(.png: 2, no suffix: 1)" in caplog.text

    def test_clean_folder_gives_no_warning(self, tmp_path, caplog):
        write(tmp_path, {"a.txt": "x", "b/c.md": "y"})
        with caplog.at_level(logging.WARNING):
            texts(tmp_path)
        assert not caplog.records

    @pytest.mark.parametrize("files", [{}, {"a.png": b"\0"}, {".hidden.txt": "x"}])
    def test_folder_without_a_supported_file_is_refused(self, tmp_path, files):
        write(tmp_path, files)
        with pytest.raises(ValueError, match="got none in"):
            read(tmp_path)


class TestUnreadable:
    """Permissions do not bind an administrator, so the refusal of the system is imitated."""

    def test_file(self, tmp_path, monkeypatch):
        write(tmp_path, {"a.txt": "x"})
        monkeypatch.setattr(Path, "open", self._refuse)
        with pytest.raises(PermissionError, match=r"a\.txt must be readable.*grant read"):
            read(tmp_path)

    def test_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Path, "iterdir", self._refuse)
        with pytest.raises(PermissionError, match=r"must be readable.*grant read"):
            read(tmp_path)

    @staticmethod
    def _refuse(path, *_):
        raise PermissionError(13, "Permission denied", str(path))


class TestShards:
    def test_each_file_and_each_package_is_one_in_the_order_of_the_documents(self, tmp_path):
        files = {"b.jsonl": '{"text":"1"}\n{"text":"2"}', "a.txt": "x", "p/y.py": "", "p/z.py": "z"}
        source = open_source(str(write(tmp_path, files)))
        assert [shard.name for shard in source.shards] == ["a.txt", "b.jsonl", "p"]
        assert [len(list(shard.records())) for shard in source.shards] == [1, 2, 1]
        assert source.shards[1].size_bytes == len(files["b.jsonl"])

    @pytest.mark.parametrize("name", ["p/a.py", "a.txt", "c.jsonl"])
    def test_fingerprint_is_of_the_content_and_the_place_in_the_folder(self, tmp_path, name):
        for folder in ("x", "y"):
            write(tmp_path / folder, {"p/a.py": "aa", "a.txt": "aa", "c.jsonl": '{"text":"aa"}'})
            for file in (tmp_path / folder).rglob("*.*"):
                os.utime(file, (1, 1))

        def prints(folder: str) -> dict[str, str]:
            shards = open_source(str(tmp_path / folder)).shards
            return {shard.name: shard.fingerprint for shard in shards}

        before = prints("x")
        assert before == prints("y")
        assert len(set(before.values())) == 3
        file = tmp_path / "x" / name
        file.write_text(file.read_text().replace("aa", "bb"))
        changed = {shard for shard, print_ in prints("x").items() if print_ != before[shard]}
        assert changed == {name.split("/", maxsplit=1)[0]}

    def test_nothing_is_read_before_it_is_asked_for(self, tmp_path):
        lines = ['{"text": "good"}', "bad"]
        shard = open_source(str(write(tmp_path, {"a.jsonl": "\n".join(lines)}))).shards[0]
        records = shard.records()
        assert next(records) == Document("a.jsonl:1", b"good")
        with pytest.raises(ValueError, match=r"a\.jsonl:2: "):
            next(records)


class TestUrls:
    @pytest.fixture
    def memory(self):
        """Files in fsspec's own storage, which has folders and nothing of a disk."""
        import fsspec

        files = fsspec.filesystem("memory")
        yield files
        files.rm("/", recursive=True)

    def test_folder_reads_like_a_local_one(self, memory, tmp_path):
        files = {
            "b.txt": "b",
            "pkg/b.py": "b = 1",
            "pkg/sub/a.py": "a = 1",
            "deep/c.jsonl": '{"text": "c"}\n{"text": "d"}',
            ".hidden/x.txt": "x",
            "deep/.y.txt": "y",
        }
        write(tmp_path, files)
        for name, content in files.items():
            memory.pipe(f"/bucket/{name}", content.encode())
        assert list(texts("memory://bucket").items()) == list(texts(tmp_path).items())
        assert texts("memory://bucket/deep/c.jsonl") == {"c.jsonl:1": b"c", "c.jsonl:2": b"d"}

    def test_fingerprint_follows_what_the_storage_says_of_a_version(self, memory):
        memory.pipe("/bucket/a.txt", b"one")
        before, same = (open_source("memory://bucket").shards[0].fingerprint for _ in range(2))
        memory.pipe("/bucket/a.txt", b"two")
        assert before == same != open_source("memory://bucket").shards[0].fingerprint

    def test_error_names_url_and_line(self, memory):
        memory.pipe("/bucket/a.jsonl", b'{"text": 1}')
        with pytest.raises(ValueError, match=r"memory://.*/a\.jsonl:1: .*got a number"):
            read("memory://bucket/a.jsonl")

    @pytest.mark.parametrize(
        ("url", "error", "words"),
        [
            ("memory://bucket/no.txt", FileNotFoundError, "must be an existing URL"),
            ("nothing://bucket/a.txt", ValueError, "of a kind that fsspec knows"),
            ("smb://host/a.txt", ModuleNotFoundError, "must be installed.*smbprotocol"),
        ],
    )
    def test_what_cannot_be_reached_is_said(self, url, error, words):
        with pytest.raises(error, match=words):
            open_source(url)

    def test_query_of_a_web_address_is_no_part_of_the_name(self, monkeypatch):
        from fsspec.implementations.http import HTTPFileSystem

        class Web(HTTPFileSystem):
            def info(self, url, **_):
                return {"name": url, "size": 1, "type": "file", "ETag": '"7"'}

        monkeypatch.setattr(
            "fsspec.core.url_to_fs", lambda url: (Web(skip_instance_cache=True), url)
        )
        (shard,) = open_source("https://host/a/b.parquet?download=true").shards
        assert shard.name == "b.parquet"
        assert shard.files[0].fingerprint == '1:etag="7"'
