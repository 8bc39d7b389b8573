"""Files to documents: strict UTF-8, and JSON lines with a `text` field.

Every error names the file and the place in it, because the user has to find it.
"""

import codecs
import json
from pathlib import Path
from typing import cast

from farspan.data.document import Document

_TEXT_FIELD = "text"


def read_text(path: Path) -> bytes:
    """Reads a file that must hold UTF-8 text.

    Args:
      path: A regular file.

    Returns:
      Its bytes, unchanged but for a byte order mark at the start, which is removed.

    Raises:
      FileNotFoundError: A symbolic link leads nowhere.
      PermissionError: The file may not be read.
      ValueError: It is not a regular file, or holds a NUL byte or invalid UTF-8.
    """
    try:
        if not path.is_file():
            if path.exists():
                raise ValueError(f"data: {path} must be a regular file; leave it out of the data")
            raise FileNotFoundError(
                f"data: {path} must lead to a file, got a broken link; repair or remove it"
            )
        raw = path.read_bytes()
    except PermissionError as error:
        raise unreadable(path) from error
    _check_is_text(path, raw)
    return raw.removeprefix(codecs.BOM_UTF8)


def unreadable(path: Path) -> PermissionError:
    """Builds the error for a file or folder that this process may not read."""
    return PermissionError(
        f"data: {path} must be readable, got permission denied; "
        f"grant read permission or leave it out of the data"
    )


def read_jsonl(path: Path, name: str) -> list[Document]:
    """Reads a file of JSON lines, one document a line; blank lines are ignored.

    Args:
      path: A UTF-8 file; each line is a JSON object whose `text` is a string.
      name: What to call the file; a document is named `name:line`, lines counted from 1.

    Returns:
      The documents in the order of the file, those with an empty text included; for a file
      without a line, one empty document with the name of the file.

    Raises:
      ValueError: A line is no JSON object with such a `text`; the message gives `file:line`.
    """
    documents: list[Document] = []
    # Only "\n" ends a JSON line; str.splitlines would also cut at U+2028 inside a text.
    for number, line in enumerate(read_text(path).split(b"\n"), start=1):
        if line.strip():
            text = _parse_line(f"{path}:{number}", line)
            documents.append(Document(f"{name}:{number}", text))
    return documents or [Document(name, b"")]


def _parse_line(place: str, line: bytes) -> bytes:
    rule = f'{place}: each line must be a JSON object with a string "{_TEXT_FIELD}"'
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{rule}, got invalid JSON ({error}); correct this line") from error
    if not isinstance(value, dict):
        raise ValueError(f'{rule}, got {_kind(value)}; write {{"{_TEXT_FIELD}": "..."}}')
    fields = cast("dict[str, object]", value)
    if _TEXT_FIELD not in fields:
        raise ValueError(
            f"{rule}, got the fields {sorted(fields)}; "
            f'rename the field that holds the document to "{_TEXT_FIELD}"'
        )
    text = fields[_TEXT_FIELD]
    if not isinstance(text, str):
        raise ValueError(f'{rule}, got {_kind(text)} in "{_TEXT_FIELD}"; write it as a string')
    if "\0" in text:
        raise ValueError(f"{rule} without NUL characters; remove \\u0000 from this line")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{rule}, got half a surrogate pair at character {error.start}; "
            f"escape the whole pair or write the character itself"
        ) from error


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {"list": "a list", "dict": "an object", "str": "a string", "bool": "a boolean"}
    return names.get(type(value).__name__, "a number")


def _check_is_text(path: Path, raw: bytes) -> None:
    remedy = "convert the file to UTF-8 text or leave it out of the data"
    nul = raw.find(b"\0")
    if nul >= 0:
        raise ValueError(f"data: {path} must be text, got a NUL byte at offset {nul}; {remedy}")
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data: {path} must be UTF-8 text, got the byte 0x{raw[error.start]:02x} at offset "
            f"{error.start} ({error.reason}); {remedy}"
        ) from error
