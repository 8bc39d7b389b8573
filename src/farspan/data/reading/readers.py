"""Text files to records, a line at a time: strict UTF-8, JSON lines, their compressed forms.

Every error names the file and the place in it, because the user has to find it.
"""

import codecs
import contextlib
import gzip
import io
import json
import zlib
from collections.abc import Generator, Iterator
from typing import Any, cast

from farspan.data.document import Document, Record
from farspan.data.optional import require
from farspan.data.reading.files import File
from farspan.data.reading.records import Place, kind, to_record

_LINE = "each line must be a JSON object with"
_COMPRESSED = frozenset({".gz", ".zst"})
_BUFFER_BYTES = 1 << 20
_PACKED_BYTES = 1 << 17
# The widest window that zstd can write (`zstd --long=31`).
_ZSTD_WINDOW_BYTES = 1 << 31


def read_text(file: File) -> bytes:
    """Reads a file that must hold UTF-8 text.

    Args:
      file: The file; it is held in memory.

    Returns:
      Its bytes, unchanged but for a byte order mark at the start, which is removed.

    Raises:
      PermissionError: The file may not be read.
      ValueError: It holds a NUL byte or invalid UTF-8.
    """
    with file.open() as stream:
        raw = stream.read()
    check_is_text(file.place, raw)
    return raw.removeprefix(codecs.BOM_UTF8)


def read_document(file: File, text_field: str, skip: int) -> Iterator[Record]:
    """Reads a text file as its one document; see `formats.Reader`."""
    del text_field
    if skip == 0:
        yield Document(str(file.name), read_text(file))


def read_jsonl(file: File, text_field: str, skip: int) -> Iterator[Record]:
    """Reads JSON lines, one record a line; blank lines are ignored; see `formats.Reader`.

    A record is named `name:line`, lines counted from 1. One line is in memory at a time.
    """
    name = str(file.name)
    # Only "\n" ends a JSON line; str.splitlines would also cut at U+2028 inside a text.
    with _decompressed(file) as stream:
        offset = 0
        for number, raw in enumerate(_lines(file, stream), start=1):
            line = raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw
            if line.strip():
                if skip == 0:
                    check_is_text(file.place, raw, offset)
                    place = Place(f"{name}:{number}", f"{file.place}:{number}", _LINE)
                    yield to_record(place, parse_object(place, line, text_field), text_field)
                skip = max(0, skip - 1)
            offset += len(raw)


def parse_object(place: Place, line: bytes, text_field: str) -> dict[str, object]:
    """Parses the JSON object that a record must be.

    Args:
      place: Where it stands.
      line: UTF-8 bytes.
      text_field: What the message says a record must have.

    Raises:
      ValueError: It is no JSON object; the message gives the place.
    """
    rule = place.rule(text_field)
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{rule}, got invalid JSON ({error}); correct it") from error
    if not isinstance(value, dict):
        raise ValueError(f'{rule}, got {kind(value)}; write {{"{text_field}": "..."}}')
    return cast("dict[str, object]", value)


def check_is_text(place: str, raw: bytes, start: int = 0) -> None:
    """Checks that bytes are UTF-8 text.

    Args:
      place: The file, for the message.
      raw: The bytes.
      start: Their offset in the file.

    Raises:
      ValueError: They hold a NUL byte or invalid UTF-8; the message gives the offset in the file.
    """
    remedy = "convert the file to UTF-8 text or leave it out of the data"
    nul = raw.find(b"\0")
    if nul >= 0:
        raise ValueError(
            f"data: {place} must be text, got a NUL byte at offset {start + nul}; {remedy}"
        )
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data: {place} must be UTF-8 text, got the byte 0x{raw[error.start]:02x} at offset "
            f"{start + error.start} ({error.reason}); {remedy}"
        ) from error


def damaged(file: File, error: object) -> ValueError:
    """Builds the error for a file that cannot be read to its end."""
    return ValueError(
        f"data: {file.place} must be whole, got a damaged or cut file ({error}); "
        f"copy or make it anew"
    )


@contextlib.contextmanager
def _decompressed(file: File) -> Generator[io.BufferedIOBase]:
    suffix = file.name.suffix.lower()
    if suffix in _COMPRESSED and not file.size:
        raise damaged(file, "it is empty")
    with file.open() as stream:
        if suffix == ".gz":
            with gzip.GzipFile(fileobj=stream) as unpacked:
                yield unpacked
        elif suffix == ".zst":
            yield io.BufferedReader(_ZstdStream(stream), _BUFFER_BYTES)
        else:
            yield stream


def _lines(file: File, stream: io.BufferedIOBase) -> Iterator[bytes]:
    try:
        yield from stream
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise damaged(file, error) from error


class _ZstdStream(io.RawIOBase):
    """The text of a zstd file; zstandard's own reader takes a cut file for a shorter one."""

    def __init__(self, stream: io.BufferedReader):
        zstandard = require("zstandard", "data: a .zst file")
        self._error = zstandard.ZstdError
        self._stream = stream
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._frame: Any = None
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._unpacked:
            self._packed = self._packed or self._stream.read(_PACKED_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("it ends inside a zstd frame")
                return 0
            self._unpack()
        size = min(len(buffer), len(self._unpacked))
        buffer[:size] = self._unpacked[:size]
        self._unpacked = self._unpacked[size:]
        return size

    def _unpack(self) -> None:
        self._frame = self._frame or self._decompressor.decompressobj()
        try:
            self._unpacked = memoryview(self._frame.decompress(self._packed))
        except self._error as error:
            raise EOFError(str(error)) from error
        self._packed = self._frame.unused_data if self._frame.eof else b""
        self._frame = None if self._frame.eof else self._frame
