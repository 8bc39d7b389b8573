"""Files wherever they lie: one small description for paths and URLs, and lists of folders."""

import difflib
import io
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from farspan.data.optional import require
from farspan.platform import is_url

_BUFFER_BYTES = 1 << 20
# What storage systems call a number or a time that changes with the content.
_VERSIONS = (
    "etag",
    "blob_id",
    "md5hash",
    "crc32c",
    "content-md5",
    "generation",
    "versionid",
    "checksum",
    "last-modified",
    "last_modified",
    "lastmodified",
    "updated",
    "mtime",
    "created",
)


@dataclass(frozen=True)
class File:
    """One file of the data.

    Attributes:
      name: Its path relative to the data that was named; for a file itself, its own name.
      place: Path or URL, for messages.
      size: Bytes.
      fingerprint: Differs where the content does: from the size, and the time of the last change or
        what the storage gives for it.
      opener: Opens the bytes for reading; the stream can seek.
      path: The path, of a file on this machine.
    """

    name: PurePosixPath
    place: str
    size: int
    fingerprint: str
    opener: Callable[[], io.BufferedReader]
    path: Path | None = None

    def open(self) -> io.BufferedReader:
        """Opens the file for reading.

        Raises:
          PermissionError: It may not be read.
        """
        try:
            return self.opener()
        except PermissionError as error:
            raise unreadable(self.place) from error


@dataclass(frozen=True)
class Listing:
    """What a path or URL leads to.

    Attributes:
      files: Its files; in a folder, in sorted order of their paths' parts.
      is_folder: Whether it is a folder.
      repeated: Links to folders that were listed already.
    """

    files: tuple[File, ...]
    is_folder: bool
    repeated: tuple[str, ...] = ()


def is_hidden(name: str) -> bool:
    """Tells whether an entry of a folder is left out: a hidden one, or a cache of Python's."""
    return name.startswith(".") or name == "__pycache__"


def list_files(data: str, nicknames: tuple[str, ...] = ()) -> Listing:
    """Lists what a path or URL leads to, without hidden entries.

    Args:
      data: Path, in which `~` is the home folder, or URL of a file or folder.
      nicknames: What else the user may have meant, for the message about a path that is missing.

    Returns:
      The file, or all files below the folder. Links are followed, and each real folder is
      listed once.

    Raises:
      FileNotFoundError: The path or URL does not exist, or a link leads nowhere.
      ModuleNotFoundError: The package for this kind of URL is not installed.
      PermissionError: A folder may not be read.
      ValueError: An entry is neither file nor folder, or no package serves this kind of URL.
    """
    if is_url(data):
        return _list_remote(data)
    path = Path(data).expanduser()
    if not path.exists():
        raise _missing_path(data, path, nicknames)
    if path.is_dir():
        return list_folder(path, is_hidden)
    return Listing((_local_file(PurePosixPath(path.name), path),), is_folder=False)


def list_folder(root: Path, leave_out: Callable[[str], bool]) -> Listing:
    """Lists the files below a local folder; see `list_files`.

    Args:
      root: The folder.
      leave_out: Tells by its name whether an entry is left out, with all that is in it.
    """
    walk = _Walk(leave_out)
    files = tuple(_local_file(name, path) for name, path in walk.files(root))
    return Listing(files, is_folder=True, repeated=tuple(walk.repeated))


def unreadable(place: object) -> PermissionError:
    """Builds the error for a file or folder that this process may not read."""
    return PermissionError(
        f"data: {place} must be readable, got permission denied; "
        f"grant read permission or leave it out of the data"
    )


def nearest_entry(path: Path, nicknames: tuple[str, ...] = ()) -> tuple[Path, str]:
    """Finds what of a missing path is missing, and what may have been meant.

    Args:
      path: A path that does not exist.
      nicknames: Names that may have been meant if the path is a bare name.

    Returns:
      The part of the path, from its start, that is the first to be missing, absolute; and a
      hint such as "did you mean ...?".
    """
    missing = path.absolute()
    while not missing.parent.is_dir():
        missing = missing.parent
    choices = {sibling.name: str(sibling) for sibling in _entries(missing.parent)}
    if len(path.parts) == 1:
        choices |= {name: f'"{name}"' for name in nicknames}
    near = difflib.get_close_matches(missing.name, choices, n=1, cutoff=0.5)
    return missing, f"did you mean {choices[near[0]]}?" if near else "check the spelling"


def _missing_path(data: str, path: Path, nicknames: tuple[str, ...]) -> FileNotFoundError:
    missing, hint = nearest_entry(path, nicknames)
    names = "".join(f'"{name}" or ' for name in nicknames)
    return FileNotFoundError(
        f"data must be {names}an existing path, got {data!r} "
        f"({missing.name} is not in {missing.parent}); {hint}"
    )


def _local_file(name: PurePosixPath, path: Path) -> File:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"data: {path} must lead to a file, got a broken link; repair or remove it"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"data: {path} must be a regular file; leave it out of the data")
    version = f"{status.st_size}:{status.st_mtime_ns}"
    return File(name, str(path), status.st_size, version, lambda: path.open("rb"), path)


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


def _list_remote(url: str) -> Listing:
    files, root = _file_system(url)
    try:
        info: Mapping[str, Any] = files.info(root)
        if info["type"] != "directory":
            name = PurePosixPath(root.split("?")[0]).name
            return Listing((_remote_file(files, PurePosixPath(name), info),), is_folder=False)
        found: Mapping[str, Mapping[str, Any]] = files.find(root, detail=True)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"data must be an existing URL, got {url!r}; check the spelling"
        ) from error
    except PermissionError as error:
        raise unreadable(url) from error
    prefix = root.rstrip("/") + "/"
    listed = ((PurePosixPath(path.removeprefix(prefix)), each) for path, each in found.items())
    kept = [(name, each) for name, each in listed if not any(map(is_hidden, name.parts))]
    kept.sort(key=lambda pair: pair[0].parts)
    return Listing(tuple(_remote_file(files, *pair) for pair in kept), is_folder=True)


def _file_system(url: str) -> tuple[Any, str]:
    fsspec = require("fsspec", f"data: the URL {url!r}")
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"data: the package for this kind of URL must be installed, got {url!r} ({error})"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"data: a URL must be of a kind that fsspec knows, got {url!r} ({error}); "
            f"use for example gs://, s3:// or https://"
        ) from error


def _remote_file(files: Any, name: PurePosixPath, info: Mapping[str, Any]) -> File:
    lowered = {str(key).lower(): value for key, value in info.items()}
    versions = [f"{key}={lowered[key]}" for key in _VERSIONS if lowered.get(key)]
    path: str = info["name"]
    return File(
        name=name,
        place=files.unstrip_protocol(path),
        size=info["size"],
        fingerprint=":".join([str(info["size"]), *versions]),
        # The streams of fsspec are slow at single lines.
        opener=lambda: io.BufferedReader(files.open(path, "rb"), _BUFFER_BYTES),
    )
