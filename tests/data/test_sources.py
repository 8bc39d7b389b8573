"""What becomes a document, in which order, and what is refused or reported."""

import codecs
import json
import logging
import os
import re
from pathlib import Path

import pytest

from farspan.data import load_documents


def write(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def texts(data: Path) -> dict[str, bytes]:
    documents = load_documents(str(data))
    assert len({document.name for document in documents}) == len(documents)
    return {document.name: document.text for document in documents}


@pytest.fixture(scope="module")
def stdlib() -> dict[str, bytes]:
    return {document.name: document.text for document in load_documents("stdlib")}


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
        assert list(stdlib.items()) == [(d.name, d.text) for d in load_documents("stdlib")]


class TestFiles:
    @pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.TXT"])
    def test_text_file_is_one_document_verbatim(self, tmp_path, name):
        write(tmp_path, {name: "héllo\r\nworld"})
        assert texts(tmp_path / name) == {name: "héllo\r\nworld".encode()}

    def test_byte_order_mark_is_no_text(self, tmp_path):
        write(
            tmp_path,
            {"a.txt": codecs.BOM_UTF8 + b"x", "b.jsonl": codecs.BOM_UTF8 + b'{"text":"y"}'},
        )
        assert texts(tmp_path) == {"a.txt": b"x", "b.jsonl:1": b"y"}

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
            ('{"content": "x"}', ["['content']", "rename"]),
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
            load_documents(str(tmp_path / "a.jsonl"))
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
            load_documents(str(tmp_path / f"a.{suffix}"))
        assert words in str(error.value)
        assert f"a.{suffix}" in str(error.value)

    def test_unsupported_type_is_refused(self, tmp_path):
        write(tmp_path, {"a.json": "{}"})
        with pytest.raises(ValueError, match=r"must be \.txt, \.md, \.py, \.jsonl.*a\.json"):
            load_documents(str(tmp_path / "a.json"))

    def test_device_file_is_refused(self, tmp_path):
        os.mkfifo(tmp_path / "pipe.txt")
        with pytest.raises(ValueError, match=r"pipe\.txt must be a regular file"):
            load_documents(str(tmp_path / "pipe.txt"))

    @pytest.mark.parametrize(
        ("name", "content"), [("a.txt", ""), ("a.jsonl", ""), ("a.jsonl", "\n \n")]
    )
    def test_file_without_text_is_refused(self, tmp_path, name, content):
        write(tmp_path, {name: content})
        with pytest.raises(ValueError, match="at least one document must hold text"):
            load_documents(str(tmp_path / name))

    def test_home_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        write(tmp_path, {"a.txt": "x"})
        assert load_documents("~/a.txt")[0].text == b"x"


class TestMissing:
    def test_names_the_nearest_sibling(self, tmp_path):
        write(tmp_path, {"corpus.txt": "x", "other.txt": "x"})
        with pytest.raises(FileNotFoundError, match=r"did you mean .*corpus\.txt"):
            load_documents(str(tmp_path / "corpsu.txt"))

    def test_names_the_folder_that_is_missing(self, tmp_path):
        write(tmp_path, {"books/a.txt": "x"})
        with pytest.raises(FileNotFoundError, match=r"\(boks is not in .*did you mean .*/books"):
            load_documents(str(tmp_path / "boks" / "deep" / "a.txt"))

    def test_path_below_a_file(self, tmp_path):
        write(tmp_path, {"a.txt": "x"})
        with pytest.raises(FileNotFoundError, match="existing path"):
            load_documents(str(tmp_path / "a.txt" / "b.txt"))

    def test_misspelt_stdlib(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(FileNotFoundError, match='did you mean "stdlib"'):
            load_documents("sdtlib")

    @pytest.mark.parametrize("data", ["", "  "])
    def test_empty_name_is_not_the_working_folder(self, data):
        with pytest.raises(ValueError, match="name a file or folder"):
            load_documents(data)

    def test_broken_link(self, tmp_path):
        (tmp_path / "a.txt").symlink_to(tmp_path / "gone.txt")
        with pytest.raises(
            FileNotFoundError, match=r"a\.txt must lead to a file, got a broken link"
        ):
            load_documents(str(tmp_path))


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

    def test_empty_documents_are_left_out_and_counted(self, tmp_path, caplog):
        write(
            tmp_path,
            {
                "a.txt": "x",
                "b.txt": "",
                "c.jsonl": '{"text": ""}\n{"text": "y"}',
                "d.jsonl": "",
                "pkg/__init__.py": "",
            },
        )
        with caplog.at_level(logging.WARNING):
            assert texts(tmp_path) == {"a.txt": b"x", "c.jsonl:2": b"y"}
        assert "left out 4 empty documents: b.txt, c.jsonl:1, d.jsonl, pkg" in caplog.text

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
            load_documents(str(tmp_path))

    def test_folder_of_empty_files_is_refused(self, tmp_path):
        write(tmp_path, {"a.txt": "", "b.md": ""})
        with pytest.raises(ValueError, match="got 2 empty and no other"):
            load_documents(str(tmp_path))


class TestUnreadable:
    """Permissions do not bind an administrator, so the refusal of the system is imitated."""

    def test_file(self, tmp_path, monkeypatch):
        write(tmp_path, {"a.txt": "x"})
        monkeypatch.setattr(Path, "read_bytes", self._refuse)
        with pytest.raises(PermissionError, match=r"a\.txt must be readable.*grant read"):
            load_documents(str(tmp_path))

    def test_folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(Path, "iterdir", self._refuse)
        with pytest.raises(PermissionError, match=r"must be readable.*grant read"):
            load_documents(str(tmp_path))

    @staticmethod
    def _refuse(path):
        raise PermissionError(13, "Permission denied", str(path))
