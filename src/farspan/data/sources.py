"""Where documents come from: the standard library's source, a file, or a folder."""

import difflib
import logging
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from farspan.data.document import Document
from farspan.data.readers import read_jsonl, read_text, unreadable

STDLIB = "stdlib"
SUFFIXES = (".txt", ".md", ".py", ".jsonl")

# Not the library itself: its tests and demos, what installers add, what differs by build.
_STDLIB_TESTS = frozenset({"test", "tests", "idle_test", "turtledemo"})
_STDLIB_INSTALLED = frozenset(
    {"site-packages", "dist-packages", "ensurepip", "sitecustomize.py", "usercustomize.py"}
)
_STDLIB_BUILD_PREFIXES = ("config-", "_sysconfigdata")

_logger = logging.getLogger(__name__)


def load_documents(data: str) -> list[Document]:
    """Loads the documents that `data` names, in an order that never changes.

    * `"stdlib"`: the source of the running Python's standard library without its test suites.
      A top-level package is one long document: its `.py` files in sorted order of their paths,
      each after a line `# file: asyncio/base_events.py`. A top-level module is one document.
    * A `.txt`, `.md` or `.py` file: one document.
    * A `.jsonl` file: one document a line, the string in its `text` field; blank lines ignored.
    * A folder: the files above in sorted order of their paths. The `.py` files under one
      top-level subfolder make one document, as in the standard library, test suites included.
      Hidden entries and `__pycache__` are left out. Links are followed, and each real folder is
      read once.

    Empty documents, and a folder's files of other types, are left out with a warning on the
    logger `farspan.data.sources`.

    Args:
      data: `"stdlib"`, or a path (`./stdlib` for a folder of that name); `~` is the home folder.

    Returns:
      At least one document; none is empty. All text is held in memory.

    Raises:
      FileNotFoundError: The path does not exist; the message names the nearest sibling.
      PermissionError: A file or folder may not be read.
      ValueError: Binary content (file and byte offset), a bad JSON line (`file:line`), an
        unsupported file type, a folder without a supported file, or nothing but empty files.
    """
    if data == STDLIB:
        return _load_stdlib()
    if not data.strip():
        raise ValueError(f'data must be "{STDLIB}" or a path, got {data!r}; name a file or folder')
    path = Path(data).expanduser()
    if not path.exists():
        raise _missing_path(data, path)
    return _without_empty(data, _load_folder(path) if path.is_dir() else _load_file(path))


def _load_stdlib() -> list[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        (name, path)
        for name, path in _Walk(_is_left_out_of_stdlib).files(root)
        if path.suffix == ".py"
    ]
    if not files:
        raise FileNotFoundError(
            f'data="{STDLIB}" must find Python source, got none in {root}; '
            f"use a Python that ships its library as source, or give a path"
        )
    return [document for document in _group_by_package(files) if document.text]


def _load_file(path: Path) -> list[Document]:
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(
            f"data: a file must be {', '.join(SUFFIXES)}, got {path} "
            f'(type "{path.suffix}"); rename it if it holds one of these, or convert it'
        )
    return _group_by_package([(PurePosixPath(path.name), path)])


def _load_folder(root: Path) -> list[Document]:
    walk = _Walk(_is_hidden)
    files: list[tuple[PurePosixPath, Path]] = []
    unsupported: Counter[str] = Counter()
    for name, path in walk.files(root):
        if path.suffix.lower() in SUFFIXES:
            files.append((name, path))
        else:
            unsupported[path.suffix or "no suffix"] += 1
    others = ", ".join(f"{kind}: {count}" for kind, count in sorted(unsupported.items()))
    if not files:
        raise ValueError(
            f"data: a folder must hold {', '.join(SUFFIXES)} files, got none in {root} "
            f"({others or 'it is empty'}); point at the folder that holds the text"
        )
    if others:
        _logger.warning("data: left out files of %s that are not text (%s)", root, others)
    if walk.repeated:
        _logger.warning("data: read once, though linked again: %s", _sample(walk.repeated))
    return _group_by_package(files)


def _group_by_package(files: list[tuple[PurePosixPath, Path]]) -> list[Document]:
    """Makes the documents: each top-level folder's Python files are one, in place of the first."""
    documents: list[Document] = []
    packages: dict[str, tuple[int, list[tuple[PurePosixPath, bytes]]]] = {}
    for name, path in files:
        suffix = path.suffix.lower()
        if suffix == ".jsonl":
            documents.extend(read_jsonl(path, str(name)))
        elif suffix == ".py" and len(name.parts) > 1:
            package = name.parts[0]
            if package not in packages:
                packages[package] = (len(documents), [])
                documents.append(Document(package, b""))
            packages[package][1].append((name, read_text(path)))
        else:
            documents.append(Document(str(name), read_text(path)))
    for package, (place, members) in packages.items():
        documents[place] = Document(package, _concatenate(members))
    return documents


def _concatenate(members: list[tuple[PurePosixPath, bytes]]) -> bytes:
    if not any(text for _, text in members):
        return b""
    parts: list[bytes] = []
    for name, text in members:
        parts.append(f"# file: {name}\n".encode(errors="replace"))
        parts.append(text if text.endswith(b"\n") or not text else text + b"\n")
    return b"".join(parts)


def _without_empty(data: str, found: list[Document]) -> list[Document]:
    empty = [document.name for document in found if not document.text]
    if len(empty) == len(found):
        raise ValueError(
            f"data: at least one document must hold text, got {len(found)} empty and no other in "
            f"{data!r}; name a file or folder with text"
        )
    if empty:
        _logger.warning("data: left out %d empty documents: %s", len(empty), _sample(empty))
    return [document for document in found if document.text]


def _sample(names: list[str], count: int = 5) -> str:
    rest = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + rest


def _missing_path(data: str, path: Path) -> FileNotFoundError:
    missing = path.absolute()
    while not missing.parent.is_dir():
        missing = missing.parent
    siblings = {sibling.name: str(sibling) for sibling in _entries(missing.parent)}
    choices = siblings if len(path.parts) > 1 else siblings | {STDLIB: f'"{STDLIB}"'}
    near = difflib.get_close_matches(missing.name, choices, n=1, cutoff=0.5)
    hint = f"did you mean {choices[near[0]]}?" if near else "check the spelling"
    return FileNotFoundError(
        f'data must be "{STDLIB}" or an existing path, got {data!r} '
        f"({missing.name} is not in {missing.parent}); {hint}"
    )


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _is_left_out_of_stdlib(name: str) -> bool:
    return (
        _is_hidden(name)
        or name in _STDLIB_TESTS | _STDLIB_INSTALLED
        or name.startswith(_STDLIB_BUILD_PREFIXES)
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except PermissionError as error:
        raise unreadable(folder) from error


@dataclass
class _Walk:
    """Lists a folder's files; `repeated` holds links to folders that were listed already."""

    leave_out: Callable[[str], bool]
    repeated: list[str] = field(default_factory=list[str])

    def files(self, root: Path) -> Iterator[tuple[PurePosixPath, Path]]:
        """Yields (path relative to `root`, path) in the order of the relative paths' parts."""
        return self._files(root, PurePosixPath(), {root.resolve()})

    def _files(
        self, folder: Path, name: PurePosixPath, seen: set[Path]
    ) -> Iterator[tuple[PurePosixPath, Path]]:
        for entry in sorted(_entries(folder), key=lambda path: path.name):
            if self.leave_out(entry.name):
                continue
            if not entry.is_dir():
                yield name / entry.name, entry
            elif (real := entry.resolve()) in seen:
                self.repeated.append(str(name / entry.name))
            else:
                seen.add(real)
                yield from self._files(entry, name / entry.name, seen)
