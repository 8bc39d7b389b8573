"""Tokenizers of Hugging Face's `tokenizers` library, from a tokenizer.json.

Every special token is renamed to a mark (`farspan.data.tokens.marks`) before the library sees the
file. So the letters of its name in a text are encoded like any others, which no option of the
library ensures: it offers them to the model, whose vocabulary often holds them as well.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import Int32

from farspan.data.optional import require
from farspan.data.tokens.marks import MARK, mark
from farspan.data.tokens.tokenizer_types import ChatFormat, Located, check_ids

_CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_TEMPLATE = "chat_template.jinja"


class JsonTokenizer:
    """A tokenizer.json, with what lies beside it.

    The names of tokens such as `eos_token` are read from tokenizer_config.json or
    special_tokens_map.json, the chat template from chat_template.jinja or tokenizer_config.json.
    Nothing is added to a text and nothing is cut off, whatever the file says.

    Args:
      path: The file.

    Attributes:
      name: `tokenizer.json:` and a digest of the file.
      vocab_size: The largest id and one.
      eos_id: The id of `eos_token`; None if there is none.
      chat: How conversations are written.

    Raises:
      ModuleNotFoundError: The package `tokenizers` is not installed.
      NotImplementedError: A special token cannot be told from text.
      ValueError: The file, or one beside it, is invalid.
    """

    def __init__(self, path: Path):
        library = require("tokenizers", f"tokenizer: {path}")
        raw = path.read_bytes()
        spec = _parse(path, raw)
        if "model" not in spec:
            raise _invalid(path, f"it has the fields {', '.join(sorted(spec))}")
        special = {
            token["content"]: int(token["id"])
            for token in spec.get("added_tokens") or []
            if token["special"]
        }
        try:
            self._tokenizer = library.Tokenizer.from_str(json.dumps(_rename(spec, special)))
        except Exception as error:  # the library raises nothing narrower
            raise _invalid(path, error) from error
        self._check_marks(path, special)
        self.name = f"tokenizer.json:{hashlib.blake2b(raw, digest_size=16).hexdigest()}"
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        config = _beside(path, _CONFIG)
        named = {
            name: text
            for name, token in (_beside(path, _SPECIAL_TOKENS) | config).items()
            if name.endswith("_token") and (text := _text_of(token))
        }
        self.chat = ChatFormat(_templates(path, config), named, special)
        self.eos_id = self._id_of(named.get("eos_token"))

    def encode(self, text: bytes) -> Int32[np.ndarray, "tokens"]:
        """Encodes UTF-8 `text`; see `Tokenizer`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[bytes]) -> list[Int32[np.ndarray, "_"]]:
        """Encodes each of `texts` on all cores; see `Tokenizer`.

        Raises:
          ValueError: A text holds a mark of `farspan.data.tokens.marks`.
        """
        decoded = [text.decode() for text in texts]
        for text in decoded:
            if found := MARK.search(text):
                raise ValueError(
                    f"tokenizer: text must not hold the noncharacters U+FDD2 and U+FDD3 around a "
                    f"number, got them at character {found.start()}; remove them"
                )
        encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_marked(self, text: str) -> Located:
        """Encodes text in which marks stand for special tokens; see `ChatTokenizer`."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
        return Located(np.array(encoding.ids, np.int32), offsets[:, 0], offsets[:, 1])

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, "..."]) -> bytes:
        """Decodes ids; see `Tokenizer`.

        Raises:
          ValueError: An id lies outside the vocabulary.
        """
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        check_ids(array, self.vocab_size)
        return self._tokenizer.decode(array.tolist(), skip_special_tokens=True).encode()

    def _id_of(self, text: str | None) -> int | None:
        if text is None:
            return None
        return self.chat.special_tokens.get(text, self._tokenizer.token_to_id(text))

    def _check_marks(self, path: Path, special: Mapping[str, int]) -> None:
        for text, number in special.items():
            if self._tokenizer.encode(mark(number), add_special_tokens=False).ids != [number]:
                raise NotImplementedError(
                    f"tokenizer: each special token must be one that text cannot make, got "
                    f"{text!r} with id {number} in {path}, which is normalised away or has another "
                    f"id; save the tokenizer anew with the library `tokenizers`"
                )


def _rename(spec: dict[str, Any], special: Mapping[str, int]) -> dict[str, Any]:
    marks = {text: mark(number) for text, number in special.items()}
    added = [
        token | {"content": marks.get(token["content"], token["content"])}
        for token in spec.get("added_tokens") or []
    ]
    model: dict[str, Any] = dict(spec["model"])
    vocab: Any = model["vocab"]
    if isinstance(vocab, dict):
        words = cast("dict[str, int]", vocab)
        model["vocab"] = {marks.get(word, word): number for word, number in words.items()}
    else:
        model["vocab"] = [[marks.get(word, word), score] for word, score in vocab]
    if model.get("unk_token") in marks:
        model["unk_token"] = marks[model["unk_token"]]
    whole = {"truncation": None, "padding": None, "post_processor": None}
    return spec | whole | {"added_tokens": added, "model": model}


def _templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    file = path.with_name(_TEMPLATE)
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    found: Any = config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    return {each["name"]: each["template"] for each in found or []}


def _text_of(token: object) -> str | None:
    """The text of a token that stands as such or as an object with its flags."""
    text = cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _beside(path: Path, name: str) -> dict[str, Any]:
    file = path.with_name(name)
    return _parse(file, file.read_bytes()) if file.is_file() else {}


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        value: object = json.loads(raw)
    except ValueError as error:
        raise _invalid(path, error) from error
    if not isinstance(value, dict):
        raise _invalid(path, "it holds no JSON object")
    return cast("dict[str, Any]", value)


def _invalid(path: Path, error: object) -> ValueError:
    return ValueError(
        f"tokenizer: {path} must be a file that the library `tokenizers` or `transformers` saved, "
        f"got another ({error}); name the folder of a fast tokenizer"
    )
