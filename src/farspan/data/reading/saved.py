"""Folders in which Hugging Face's `datasets` saved a dataset: which of their files hold it."""

import json
from collections.abc import Sequence
from typing import Any

from farspan.data.reading.files import File

_SPLITS = "dataset_dict.json"
_STATE = "state.json"
_INFO = "dataset_info.json"


def saved_files(data: str, files: Sequence[File]) -> list[File] | None:
    """Finds the files of a saved dataset.

    Args:
      data: The folder, for messages.
      files: All files below it.

    Returns:
      Its data files in the order of its rows; None if the folder is no saved dataset.

    Raises:
      ValueError: The folder, or one in it, holds several splits, of which one must be named; or a
        data file is missing.
    """
    by_name = {str(file.name): file for file in files}
    for file in by_name.values():
        if file.name.name == _SPLITS:
            splits = _read_json(file).get("splits", [])
            folder = file.place.removesuffix(_SPLITS)
            raise ValueError(
                f"data: a saved dataset must have one split, got {', '.join(splits)} in {folder}; "
                f"name one of them: {', '.join(folder + split for split in splits)}"
            )
    if not {_STATE, _INFO} <= by_name.keys():
        return None
    names = [entry["filename"] for entry in _read_json(by_name[_STATE])["_data_files"]]
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ValueError(
            f"data: {by_name[_STATE].place} names the data files of its folder, got none called "
            f"{', '.join(missing)} there; copy the whole folder {data}"
        )
    return [by_name[name] for name in names]


def _read_json(file: File) -> dict[str, Any]:
    with file.open() as stream:
        return json.load(stream)
