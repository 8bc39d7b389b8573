"""Documents tokenised once, kept in a folder of their own, and mapped into memory from there.

A folder in the cache is named after the digest of everything that its tokens depend on. It is
written under another name and renamed when it is complete, so a folder with that name is whole;
its sizes are checked when it is opened all the same.
"""

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from farspan.data.cache.abandoned import building_name, remove_abandoned
from farspan.data.cache.encoding import encode_in_order, record_bytes
from farspan.data.cache.store import TokenStore
from farspan.data.cache.store_writer import FILES, StoreWriter, token_dtype
from farspan.data.progress import Ticker, ignore, short
from farspan.data.reading.sources import Source
from farspan.data.tokens.encode import Encoder
from farspan.platform import folder_to_write, user_cache_dir

FORMAT = 2
"""Changes when the files of a cache or the meaning of a record do."""

_META = "meta.json"

_logger = logging.getLogger(__name__)


def cached_tokens(
    source: Source,
    encoder: Encoder,
    *,
    text_field: str = "text",
    cache_dir: str = "",
    progress: Callable[[str], None] = ignore,
) -> TokenStore:
    """Returns the tokens of a source from the cache, after making them if they are not there.

    Several processes may do this at once: each makes the whole, the first to be ready publishes
    it, and the others discard theirs and use that.

    Args:
      source: What to tokenise.
      encoder: Makes the ids.
      text_field: The field that `source` reads.
      cache_dir: The folder of the cache; empty: `user_cache_dir("tokens")`.
      progress: Called about once a second with how far tokenising is.

    Returns:
      The tokens, mapped from files: what is not used takes no memory.

    Raises:
      ValueError: There is no token in the source, a record is not as it should be, or the cache's
        folder is a URL.
      OSError: The folder cannot be written, or the disk is full.

    Cost: on disk 2 bytes a token, or 4 with more than 65,536 ids, and with conversations 1 more.
    """
    key = cache_key(source, encoder, text_field)
    setting = "cache_dir (--cache-dir)"
    root = folder_to_write(cache_dir, setting) if cache_dir else user_cache_dir("tokens")
    folder = root / _digest(key)
    store = _load(folder, key, encoder.vocab_size)
    if store is not None:
        return store
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
        remove_abandoned(root)
        building = root / building_name(uuid.uuid4().hex[:8])
        building.mkdir()
    try:
        meta = _build(building, source, encoder, progress)
        with _writing(root):
            _write_meta(building / _META, {"key": key, **meta})
            _publish(building, folder, lambda: _load(folder, key, encoder.vocab_size) is not None)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    store = _load(folder, key, encoder.vocab_size)
    if store is None:
        raise OSError(
            f"cache: a token cache must stay as it was written, got another {folder}; "
            f"set cache_dir (--cache-dir) to a folder that nothing else writes"
        )
    return store


def cache_key(source: Source, encoder: Encoder, text_field: str) -> dict[str, Any]:
    """Returns everything that the tokens of `source` depend on, as JSON values."""
    return {
        "format": FORMAT,
        "encoder": encoder.name,
        "text_field": text_field,
        "shards": [[shard.name, shard.fingerprint] for shard in source.shards],
    }


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def _build(
    building: Path, source: Source, encoder: Encoder, progress: Callable[[str], None]
) -> dict[str, Any]:
    ticker = Ticker()
    documents = size = 0
    with _writing(building.parent):
        writer = StoreWriter(building, encoder.vocab_size)
    try:
        for _, record, encoded in encode_in_order(
            ((None, record) for record in source.records()), encoder
        ):
            with _writing(building.parent):
                writer.add(encoded)
            documents, size = documents + 1, size + record_bytes(record)
            if ticker.is_due():
                progress(
                    f"tokenising {source.name}: {documents:,} documents, {short(size, 'B')}, "
                    f"{short(writer.tokens)} tokens"
                )
        if writer.tokens == 0:
            raise ValueError(
                f"data: at least one document must hold text, got {documents} empty and no other "
                f"in {source.name}; name a file or folder with text"
            )
        with _writing(building.parent):
            return writer.finish()
    finally:
        writer.close()


@contextmanager
def _writing(root: Path) -> Generator[None, None, None]:
    try:
        yield
    except OSError as error:
        raise type(error)(
            f"cache: the folder of tokenised data must be writable and have room, got "
            f"{error.strerror or error} in {root}; free some space there, or set cache_dir "
            f"(--cache-dir) to another folder"
        ) from error


def _write_meta(path: Path, meta: dict[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump({**meta, "digest_of_meta": _digest(meta)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path.parent)


def _publish(building: Path, folder: Path, is_whole: Callable[[], bool]) -> None:
    while True:
        try:
            building.rename(folder)
        except OSError:
            if not folder.exists():
                raise
            if is_whole():  # another process was first
                return
            _remove_damaged(folder)
        else:
            _sync_folder(folder.parent)
            return


def _remove_damaged(folder: Path) -> None:
    away = folder.parent / building_name(uuid.uuid4().hex[:8])
    try:
        folder.rename(away)
    except FileNotFoundError:
        return  # another process was first
    shutil.rmtree(away, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _load(folder: Path, key: dict[str, Any], vocab_size: int) -> TokenStore | None:
    if not folder.exists():
        return None
    try:
        return _open(folder, key, vocab_size)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _logger.warning("cache: %s is damaged (%s) and is made anew", folder, error)
        return None


def _open(folder: Path, key: dict[str, Any], vocab_size: int) -> TokenStore:
    meta: dict[str, Any] = json.loads((folder / _META).read_text(encoding="utf-8"))
    if meta.pop("digest_of_meta") != _digest(meta) or meta["key"] != key:
        raise ValueError(f"{_META} is not what was written")
    sizes = cast("dict[str, int]", meta["files"])
    arrays: dict[str, Any] = {}
    for name, dtype in {"tokens": token_dtype(vocab_size), **FILES}.items():
        if name not in sizes:
            continue
        path = folder / f"{name}.bin"
        if path.stat().st_size != sizes[name]:
            raise ValueError(f"{path.name} has {path.stat().st_size} bytes, not {sizes[name]}")
        # A plain array over the mapping: slices of np.memmap itself are slow.
        arrays[name] = np.asarray(np.memmap(path, dtype, mode="r"))
    borders = arrays["offsets"]
    if borders[0] != 0 or borders[-1] != len(arrays["tokens"]) or (np.diff(borders) < 1).any():
        raise ValueError("offsets.bin does not fit tokens.bin")
    return TokenStore(
        tokens=arrays["tokens"],
        offsets=borders,
        scored=arrays.get("scored"),
        token_counts=arrays["token_counts"],
        empty_documents=meta["empty_documents"],
        digest=meta["digest"],
    )
