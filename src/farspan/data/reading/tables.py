"""Parquet and Arrow files to records, one part of a table at a time.

Record `name:7` is the seventh row. Readers are described in `formats.Reader`.
"""

import contextlib
from collections.abc import Generator, Iterable, Iterator
from typing import Any, cast

from farspan.data.document import Record
from farspan.data.optional import require
from farspan.data.reading.files import File, unreadable
from farspan.data.reading.readers import damaged
from farspan.data.reading.records import Place, record_fields, to_record

_BATCH_ROWS = 32
_ROW = "each row must have"
_ARROW_FILE_MAGIC = b"ARROW1"
_ARROW_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
# What a message may have set to null; other keys are null where only other messages have them.
_NULLABLE = frozenset({"content", "value"})


def read_parquet(file: File, text_field: str, skip: int) -> Iterator[Record]:
    """Reads a Parquet file, one row group at a time; groups that are skipped are not read."""
    parquet = require("pyarrow.parquet", f"data: {file.place}")
    with file.open() as stream, _whole(file):
        table = parquet.ParquetFile(stream)
        columns = _columns(file, table.schema_arrow.names, text_field)
        first = 0
        for group in range(table.num_row_groups):
            rows: int = table.metadata.row_group(group).num_rows
            if first + rows > skip:
                batches = table.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns)
                yield from _records(file, batches, text_field, first, skip)
            first += rows


def read_arrow(file: File, text_field: str, skip: int) -> Iterator[Record]:
    """Reads a file of Arrow's IPC format or stream, one record batch at a time."""
    arrow = require("pyarrow", f"data: {file.place}")
    with _whole(file), _arrow_source(file, arrow) as source:
        is_file = source.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        if not is_file:
            _check_stream_end(file, source)
        source.seek(0)
        table = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
        columns = _columns(file, table.schema.names, text_field)
        every = map(table.get_batch, range(table.num_record_batches)) if is_file else table
        batches = (batch.select(columns) for batch in cast("Iterable[Any]", every))
        yield from _records(file, batches, text_field, 0, skip)


def _records(
    file: File, batches: Iterable[Any], text_field: str, first: int, skip: int
) -> Iterator[Record]:
    for batch in batches:
        columns: list[tuple[str, Any]] = list(zip(batch.schema.names, batch.columns, strict=True))
        for row in range(max(0, min(skip - first, batch.num_rows)), batch.num_rows):
            number = first + row + 1
            place = Place(f"{file.name}:{number}", f"{file.place}:{number}", _ROW)
            fields = {name: _value(place, column[row]) for name, column in columns}
            yield to_record(place, fields, text_field)
        first += batch.num_rows


def _value(place: Place, cell: Any) -> object:
    try:
        return _without_nulls(cell.as_py())
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{place.where} must be UTF-8 text, got the byte 0x{error.object[error.start]:02x} at "
            f"offset {error.start} ({error.reason}); correct this row"
        ) from error


def _without_nulls(value: object) -> object:
    """Removes the keys that a table gives an object because another object has them."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[object]", value)]
    if isinstance(value, dict):
        return {
            key: _without_nulls(item)
            for key, item in cast("dict[str, object]", value).items()
            if item is not None or key in _NULLABLE
        }
    return value


def _columns(file: File, names: list[str], text_field: str) -> list[str]:
    wanted = record_fields(text_field)
    found = [name for name in wanted if name in names]
    if not found:
        rule = Place(str(file.name), file.place, _ROW).rule(text_field)
        raise ValueError(
            f"{rule}, got the fields {sorted(names)}; "
            f"set text_field to the one that holds the document"
        )
    return found


def _check_stream_end(file: File, source: Any) -> None:
    source.seek(max(0, file.size - len(_ARROW_STREAM_END)))
    if source.read(len(_ARROW_STREAM_END)) != _ARROW_STREAM_END:
        raise damaged(file, "its stream has no end mark")


def _arrow_source(file: File, arrow: Any) -> Any:
    # Of a mapped file, only the pages that are read are fetched.
    return arrow.PythonFile(file.open()) if file.path is None else arrow.memory_map(str(file.path))


@contextlib.contextmanager
def _whole(file: File) -> Generator[None]:
    arrow = require("pyarrow", f"data: {file.place}")
    try:
        yield
    except PermissionError as error:
        raise unreadable(file.place) from error
    except (arrow.ArrowException, OSError) as error:
        raise damaged(file, error) from error
