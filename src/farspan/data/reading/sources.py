"""Where records come from: the standard library's source, a file, a folder, or a URL."""

import functools
import hashlib
import logging
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from farspan.data.document import Document, Record
from farspan.data.reading.files import File, is_hidden, list_files, list_folder
from farspan.data.reading.formats import READERS, reader_for
from farspan.data.reading.readers import read_text
from farspan.data.reading.saved import saved_files

STDLIB = "stdlib"

# Not the library itself: its tests and demos, what installers add, what differs by build.
_STDLIB_TESTS = frozenset({"test", "tests", "idle_test", "turtledemo"})
_STDLIB_INSTALLED = frozenset(
    {"site-packages", "dist-packages", "ensurepip", "sitecustomize.py", "usercustomize.py"}
)
_STDLIB_BUILD_PREFIXES = ("config-", "_sysconfigdata")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Shard:
    """A part of a source that is read from its start: a file, or the files of one document.

    Attributes:
      name: Unique in the source, for messages: `asyncio`, `web/000.jsonl.zst`.
      files: What it is read from.
      read: Yields its records but for the first ones, whose number it takes.
    """

    name: str
    files: tuple[File, ...]
    read: Callable[[int], Iterator[Record]]

    @property
    def size_bytes(self) -> int:
        """Bytes of the files, as they are stored."""
        return sum(file.size for file in self.files)

    @property
    def fingerprint(self) -> str:
        """Differs where the content does: a digest of the files' names, sizes and versions."""
        digest = hashlib.blake2b(digest_size=16)
        for file in self.files:
            digest.update(f"{file.name}\0{file.fingerprint}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def records(self, skip: int = 0) -> Iterator[Record]:
        """Yields the records in an order that never changes, a few in memory at a time.

        Args:
          skip: Records at the start that are left out; it is cheaper than reading them where the
            format allows.

        Raises:
          OSError: A file is not readable, or no longer there.
          ValueError: Binary content (file and byte offset), a record that is none (`file:line`), or
            a file that is damaged or cut short.
        """
        return self.read(skip)


@dataclass(frozen=True, eq=False)
class Source:
    """All that one name of data stands for.

    Attributes:
      name: The name that was given.
      shards: At least one, in an order that never changes.
    """

    name: str
    shards: tuple[Shard, ...]

    def records(self) -> Iterator[Record]:
        """Yields the records of all shards, one after another; see `Shard.records`."""
        for shard in self.shards:
            yield from shard.records()


def open_source(data: str, *, text_field: str = "text") -> Source:
    """Finds the files that `data` names; nothing is read yet.

    * `"stdlib"`: the source of the running Python's standard library without its test suites.
      A top-level package is one long document: its `.py` files in sorted order of their paths,
      each after a line `# file: asyncio/base_events.py`. A top-level module is one document.
    * A `.txt`, `.md` or `.py` file: one document.
    * A `.jsonl`, `.jsonl.gz` or `.jsonl.zst` file: one record a line; blank lines are ignored.
    * A `.parquet` or `.arrow` file: one record a row. An `.array_record` or `.arrayrecord` file:
      one record each, which is JSON, a `tf.train.Example` or text, as the first one is.
    * A folder that Hugging Face's `save_to_disk` wrote: its rows.
    * Any other folder: the files above in sorted order of their paths. The `.py` files under one
      top-level subfolder make one document, as in the standard library, test suites included.
      Hidden entries and `__pycache__` are left out. Links are followed, and each real folder is
      read once. A folder's files of other types are left out with a warning on the logger
      `farspan.data.reading.sources`.

    A record with a list `messages` (or ShareGPT's `conversations`) is a conversation; any other is
    a document, the string in its `text_field`.

    Args:
      data: `"stdlib"`, a path (`./stdlib` for a folder of that name; `~` is the home folder), or a
        URL that fsspec knows (`gs://bucket/folder`).
      text_field: Name of the field that holds a document's text.

    Returns:
      The source. Its records may hold empty documents.

    Raises:
      FileNotFoundError: The path or URL does not exist; the message names the nearest sibling.
      ModuleNotFoundError: The package for this kind of URL or file is not installed.
      PermissionError: A folder may not be read.
      ValueError: An unsupported file type, a folder without a supported file, or a saved dataset
        with several splits.
    """
    if data == STDLIB:
        return _open_stdlib()
    if not data.strip():
        raise ValueError(
            f'data must be "{STDLIB}", a path or a URL, got {data!r}; name a file or folder'
        )
    listing = list_files(data, nicknames=(STDLIB,))
    if listing.repeated:
        _logger.warning("data: read once, though linked again: %s", _sample(listing.repeated))
    if not listing.is_folder:
        files = [_supported_file(file) for file in listing.files]
    else:
        files = saved_files(data, listing.files) or _supported_files(data, listing.files)
    return Source(data, _shards(files, text_field))


def _open_stdlib() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    listing = list_folder(root, _is_left_out_of_stdlib)
    files = [file for file in listing.files if file.name.suffix == ".py"]
    if not files:
        raise FileNotFoundError(
            f'data="{STDLIB}" must find Python source, got none in {root}; '
            f"use a Python that ships its library as source, or give a path"
        )
    return Source(STDLIB, tuple(shard for shard in _shards(files, "") if shard.size_bytes))


def _supported_file(file: File) -> File:
    if reader_for(file) is None:
        raise ValueError(
            f"data: a file must be {', '.join(READERS)}, got {file.place} "
            f'(type "{file.name.suffix}"); rename it if it holds one of these, or convert it'
        )
    return file


def _supported_files(data: str, files: Iterable[File]) -> list[File]:
    supported: list[File] = []
    others: Counter[str] = Counter()
    for file in files:
        if reader_for(file):
            supported.append(file)
        else:
            others[file.name.suffix or "no suffix"] += 1
    listed = ", ".join(f"{suffix}: {count}" for suffix, count in sorted(others.items()))
    if not supported:
        raise ValueError(
            f"data: a folder must hold {', '.join(READERS)} files, got none in {data} "
            f"({listed or 'it is empty'}); point at the folder that holds the data"
        )
    if listed:
        _logger.warning("data: left out files of %s that are no data (%s)", data, listed)
    return supported


def _shards(files: Iterable[File], text_field: str) -> tuple[Shard, ...]:
    """Makes the shards: each top-level folder's Python files are one, in place of the first."""
    groups: dict[tuple[str, bool], list[File]] = {}
    for file in files:
        top, *below = file.name.parts
        in_package = file.name.suffix.lower() == ".py" and bool(below)
        name = top if in_package else str(file.name)
        groups.setdefault((name, in_package), []).append(file)
    return tuple(
        Shard(name, tuple(members), _records_of(name, in_package, tuple(members), text_field))
        for (name, in_package), members in groups.items()
    )


def _records_of(
    name: str, in_package: bool, files: tuple[File, ...], text_field: str
) -> Callable[[int], Iterator[Record]]:
    if in_package:
        return functools.partial(_read_package, name, files)
    (file,) = files
    reader = reader_for(file)
    assert reader is not None
    return functools.partial(reader, file, text_field)


def _read_package(name: str, files: tuple[File, ...], skip: int) -> Iterator[Record]:
    if skip == 0:
        members = [(file, read_text(file)) for file in files]
        parts = [part for file, text in members for part in _headed(file, text)]
        yield Document(name, b"".join(parts) if any(text for _, text in members) else b"")


def _headed(file: File, text: bytes) -> Iterator[bytes]:
    yield f"# file: {file.name}\n".encode(errors="replace")
    yield text if text.endswith(b"\n") or not text else text + b"\n"


def _sample(names: tuple[str, ...], count: int = 5) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest


def _is_left_out_of_stdlib(name: str) -> bool:
    return (
        is_hidden(name)
        or name in _STDLIB_TESTS | _STDLIB_INSTALLED
        or name.startswith(_STDLIB_BUILD_PREFIXES)
    )
