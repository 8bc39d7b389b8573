"""ArrayRecord files to records.

Records are bytes, and nothing in the file says what they mean. The first record decides for all:
a JSON object, a `tf.train.Example`, or else UTF-8 text. A record of another kind is then refused.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from farspan.data.document import Document, Record
from farspan.data.optional import require
from farspan.data.reading.examples import parse_example
from farspan.data.reading.files import File
from farspan.data.reading.readers import check_is_text, damaged, parse_object
from farspan.data.reading.records import Place, to_record

_RECORD = "each record must have"
_BATCH_RECORDS = 32

_Decode = Callable[[Place, bytes, str], Record]


def read_array_record(file: File, text_field: str, skip: int) -> Iterator[Record]:
    """Reads an ArrayRecord file; records that are skipped are not read; see `formats.Reader`.

    Record `name:7` is the seventh.

    Raises:
      NotImplementedError: The file is remote.
    """
    module = require("array_record.python.array_record_module", f"data: {file.place}", "train")
    if file.path is None:
        raise NotImplementedError(
            f"data: an ArrayRecord file must be on this machine, got {file.place}; copy it first"
        )
    file.open().close()  # tells a file that may not be read from one that is damaged
    reader = module.ArrayRecordReader(str(file.path))
    if not reader.ok():  # it would else pass for an empty one
        raise damaged(file, "its index of records is missing")
    try:
        decode = _decoder(_read(file, reader, 0, 1)[0]) if reader.num_records() else _from_text
        for start in range(skip, reader.num_records(), _BATCH_RECORDS):
            stop = min(start + _BATCH_RECORDS, reader.num_records())
            for number, raw in enumerate(_read(file, reader, start, stop), start + 1):
                place = Place(f"{file.name}:{number}", f"{file.place}:{number}", _RECORD)
                yield decode(place, raw, text_field)
    finally:
        reader.close()


def _read(file: File, reader: Any, start: int, stop: int) -> list[bytes]:
    try:
        return reader.read(start, stop)
    except (RuntimeError, ValueError, IndexError) as error:
        raise damaged(file, error) from error


def _decoder(first: bytes) -> _Decode:
    if _is_object(first):
        return _from_json
    return _from_text if parse_example(first) is None else _from_example


def _is_object(raw: bytes) -> bool:
    if not raw.lstrip().startswith(b"{"):
        return False
    try:
        json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return True


def _from_json(place: Place, raw: bytes, text_field: str) -> Record:
    return to_record(place, parse_object(place, raw, text_field), text_field)


def _from_text(place: Place, raw: bytes, text_field: str) -> Record:
    del text_field
    check_is_text(place.where, raw)
    return Document(place.name, raw)


def _from_example(place: Place, raw: bytes, text_field: str) -> Record:
    fields = parse_example(raw)
    if fields is None:
        raise ValueError(
            f"{place.where}: each record must be a tf.train.Example as the first one is, got "
            f"{len(raw)} other bytes; write all records alike"
        )
    text = fields.get(text_field)
    if isinstance(text, bytes):
        check_is_text(f"{place.where}, {text_field}", text)
        return Document(place.name, text)
    return to_record(place, fields, text_field)
