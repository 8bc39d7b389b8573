"""Records to tokens in several threads, in the order of the records."""

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from farspan.data.batch import validate_ids
from farspan.data.document import Document, Record
from farspan.data.tokens.encode import Encoded, Encoder

Place = TypeVar("Place")

_CHUNK_BYTES = 1 << 20
_CHUNK_RECORDS = 256
_MAX_THREADS = 8


def encode_in_order(
    records: Iterable[tuple[Place, Record]], encoder: Encoder
) -> Generator[tuple[Place, Record, Encoded], None, None]:
    """Encodes records in threads, since tokenizers release the interpreter's lock.

    A few MB of text per thread are read ahead, whatever the number of records.

    Args:
      records: Each with whatever the caller wants to have back beside it.
      encoder: Makes the ids; it must be safe to call from several threads.

    Yields:
      (place, record, tokens) in the order of `records`.

    Raises:
      ValueError: An id is outside the encoder's vocabulary, or a record cannot be encoded.
      Exception: Whatever reading the records raised.
    """
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    chunks = _chunks(records)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="farspan-encode")
    ahead: deque[Future[list[tuple[Place, Record, Encoded]]]] = deque()

    def encode(chunk: list[tuple[Place, Record]]) -> list[tuple[Place, Record, Encoded]]:
        places, texts = zip(*chunk, strict=True)
        encoded = encoder.encode_batch(texts)
        for record, each in zip(texts, encoded, strict=True):
            where = f"document {record.name}"
            validate_ids(each.tokens, each.tokens, encoder.vocab_size, where=where)
        return list(zip(places, texts, encoded, strict=True))

    def read_ahead() -> None:
        try:
            for chunk in islice(chunks, threads - len(ahead)):
                ahead.append(pool.submit(encode, chunk))
        except Exception as error:  # its turn comes after the records before it
            ahead.append(Future())
            ahead[-1].set_exception(error)

    try:
        read_ahead()
        while ahead:
            done = ahead.popleft().result()
            read_ahead()
            yield from done
    finally:
        pool.shutdown(cancel_futures=True)


def record_bytes(record: Record) -> int:
    """Returns the size of a record's text in bytes, of a conversation about that."""
    if isinstance(record, Document):
        return len(record.text)
    return sum(len(str(message)) for message in record.messages)


def _chunks(
    records: Iterable[tuple[Place, Record]],
) -> Iterator[list[tuple[Place, Record]]]:
    chunk: list[tuple[Place, Record]] = []
    size = 0
    try:
        for place, record in records:
            chunk.append((place, record))
            size += record_bytes(record)
            if size >= _CHUNK_BYTES or len(chunk) >= _CHUNK_RECORDS:
                yield chunk
                chunk, size = [], 0
    except Exception:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk
