"""Text to token ids and back: bytes, or a tokenizer from a file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from farspan.data.reading.files import nearest_entry
from farspan.data.tokens.marks import MARK, mark
from farspan.data.tokens.sentencepiece_model import SentencePieceTokenizer
from farspan.data.tokens.tokenizer_json import JsonTokenizer
from farspan.data.tokens.tokenizer_types import ChatFormat, Located, Tokenizer, check_ids

_JSON_FILE = "tokenizer.json"
_SENTENCEPIECE_FILE = "tokenizer.model"

_CHATML = (
    "{% for message in messages %}"
    "{% if tools or message.content is not string %}"
    "{{ raise_exception('no place for tools; set chat_template to a template that has one') }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
)


class ByteTokenizer:
    """One token a byte, and two special ids that text never makes.

    Documents are told apart by segment ids, never by a special id, so text cannot forge a border.
    In conversations the special ids begin and end a turn: `<|im_start|>` and `<|im_end|>` of a
    template.
    """

    name = "byte"
    bos_id = 256
    eos_id = 257
    vocab_size = 258
    chat = ChatFormat(
        templates={"default": _CHATML},
        named_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        special_tokens={"<|im_start|>": bos_id, "<|im_end|>": eos_id},
    )

    def encode(self, text: bytes) -> Int32[np.ndarray, "tokens"]:
        """Encodes text.

        Args:
          text: Any bytes.

        Returns:
          int32 [len(text)], each 0..255.
        """
        return np.frombuffer(text, dtype=np.uint8).astype(np.int32)

    def encode_batch(self, texts: Sequence[bytes]) -> list[Int32[np.ndarray, "_"]]:
        """Encodes each of `texts`; see `encode`."""
        return [self.encode(text) for text in texts]

    def encode_marked(self, text: str) -> Located:
        """Encodes text with marks.

        Args:
          text: Text in which `marks.mark` stands for special tokens.

        Returns:
          The ids: one for each mark, and one for each byte of the rest. All bytes of a character
          are where it is.
        """
        # Odd parts are the ids of marks; a byte 0b10...... goes on with the character before.
        parts = MARK.split(text)
        raw = [self.encode(part.encode()) for part in parts[::2]]
        widths = [((part & 0xC0) != 0x80).astype(np.int32) for part in raw]
        for index, number in enumerate(parts[1::2]):
            raw[index] = np.append(raw[index], np.int32(number))
            widths[index] = np.append(widths[index], np.int32(len(mark(int(number)))))
        width = np.concatenate(widths)
        ends = np.cumsum(width, dtype=np.int32)
        starts = np.where(width > 0, ends - width, ends - 1).astype(np.int32)
        return Located(np.concatenate(raw), starts, ends)

    def decode(self, ids: Sequence[int] | Int32[np.ndarray, "..."]) -> bytes:
        """Decodes ids.

        Args:
          ids: Integers, any shape, each in [0, 258); BOS and EOS stand for no text.

        Returns:
          The bytes, of which `encode` gives back the ids without BOS and EOS.

        Raises:
          ValueError: An id lies outside the vocabulary.
        """
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        check_ids(array, self.vocab_size)
        return array[array < self.bos_id].astype(np.uint8).tobytes()


def get_tokenizer(name: str) -> Tokenizer:
    """Finds a tokenizer.

    Args:
      name: `"byte"`; or the path of a tokenizer.json, of a SentencePiece .model, or of a folder
        that holds a tokenizer.json or else a tokenizer.model. `~` is the home folder.

    Returns:
      The tokenizer.

    Raises:
      FileNotFoundError: The path does not exist; the message names the nearest sibling.
      ModuleNotFoundError: The package for this kind of tokenizer is not installed.
      ValueError: The name is empty, or the file no tokenizer of a kind that is known.
    """
    if name == ByteTokenizer.name:
        return ByteTokenizer()
    rule = f'tokenizer must be "{ByteTokenizer.name}" or the path of a {_JSON_FILE} or .model file'
    if not name.strip():
        raise ValueError(f"{rule}, got {name!r}; name one")
    path = Path(name).expanduser()
    if not path.exists():
        missing, hint = nearest_entry(path, (ByteTokenizer.name,))
        raise FileNotFoundError(
            f"{rule} on this machine, got {name!r} ({missing.name} is not in {missing.parent}); "
            f"{hint}"
        )
    if path.is_dir():
        choices = [path / _JSON_FILE, path / _SENTENCEPIECE_FILE]
        path = next((choice for choice in choices if choice.is_file()), path)
    if path.suffix == ".json":
        return JsonTokenizer(path)
    if path.suffix == ".model":
        return SentencePieceTokenizer(path)
    raise ValueError(
        f"{rule}, got {name!r}, which is {'a folder without one' if path.is_dir() else 'neither'}; "
        f"name the tokenizer's file"
    )
