"""Which reader reads which file, by its suffix."""

from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from farspan.data.document import Record
from farspan.data.reading.files import File
from farspan.data.reading.readers import read_document, read_jsonl
from farspan.data.reading.stored import read_array_record
from farspan.data.reading.tables import read_arrow, read_parquet


@runtime_checkable
class Reader(Protocol):
    """Reads the records of a file."""

    def __call__(self, file: File, text_field: str, skip: int) -> Iterator[Record]:
        """Yields the records in the order of the file, with memory for few of them at a time.

        Args:
          file: The file.
          text_field: Name of the field that holds a document's text.
          skip: Records at the start that are left out, at less than the cost of reading them
            where the format allows.

        Raises:
          PermissionError: The file may not be read.
          ValueError: The file is damaged, or a record is none; the message gives the place.
        """
        ...


READERS: dict[str, Reader] = {
    ".txt": read_document,
    ".md": read_document,
    ".py": read_document,
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".jsonl.zst": read_jsonl,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".array_record": read_array_record,
    ".arrayrecord": read_array_record,
}


def reader_for(file: File) -> Reader | None:
    """Returns the reader of a file, None where its suffix has none."""
    name = file.name.name.lower()
    return next((reader for suffix, reader in READERS.items() if name.endswith(suffix)), None)
