"""Records to token ids, and which of them the loss may be on."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int32

from farspan.data.document import Conversation, Record
from farspan.data.reading.files import nearest_entry
from farspan.data.tokens.chat import ChatTemplate, Rendered
from farspan.data.tokens.tokenizer_types import ChatTokenizer, Located, Tokenizer
from farspan.data.tokens.tokenizers import get_tokenizer


@dataclass(frozen=True, eq=False)
class Encoded:
    """The tokens of one record.

    Attributes:
      tokens: The ids, int32.
      scored: Which tokens the loss may be on, as labels; None: all of them.
    """

    tokens: Int32[np.ndarray, "tokens"]
    scored: Bool[np.ndarray, "tokens"] | None


class Encoder:
    """Makes ids of documents and conversations; see `make_encoder`.

    Args:
      tokenizer: Makes the ids.
      append_eos: End each document with the tokenizer's `eos_id`. The end of a conversation is its
        template's matter.
      chat_template: Jinja source of the template of conversations; left empty, the tokenizer's own.

    Attributes:
      tokenizer: As given.
      name: Identifies everything that changes the ids.
      vocab_size: Every id is below this.

    Raises:
      NotImplementedError: `chat_template` with a tokenizer that cannot encode conversations.
      ValueError: `append_eos` with a tokenizer that has no such token, or an invalid template.
    """

    def __init__(self, tokenizer: Tokenizer, *, append_eos: bool = False, chat_template: str = ""):
        if append_eos and tokenizer.eos_id is None:
            raise ValueError(
                f"append_eos needs a tokenizer with an end-of-sequence token, got "
                f"{tokenizer.name}, which names none; add eos_token to its "
                f"tokenizer_config.json, or leave append_eos off"
            )
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self._eos_id = tokenizer.eos_id if append_eos else None
        self._template = _template(tokenizer, chat_template)
        parts = [tokenizer.name]
        parts += [f"eos {self._eos_id}"] if append_eos else []
        parts += [f"chat {self._template.digest}"] if self._template else []
        self.name = ", ".join(parts)

    def encode(self, record: Record) -> Encoded:
        """Encodes one record.

        Args:
          record: A document, or a conversation, of which the assistant's turns are scored.

        Returns:
          Its tokens; none for a document without text.

        Raises:
          NotImplementedError: A conversation, and the tokenizer cannot encode any.
          ValueError: The template is missing or does not suit; the message names the record.
        """
        return self.encode_batch([record])[0]

    def encode_batch(self, records: Sequence[Record]) -> list[Encoded]:
        """Encodes several records, sooner than one after another; see `encode`."""
        texts = [each.text for each in records if not isinstance(each, Conversation)]
        documents = iter(self.tokenizer.encode_batch(texts))
        return [
            self._conversation(each)
            if isinstance(each, Conversation)
            else Encoded(self._ended(next(documents)), None)
            for each in records
        ]

    def _ended(self, tokens: Int32[np.ndarray, "_"]) -> Int32[np.ndarray, "_"]:
        if self._eos_id is None or not len(tokens):
            return tokens
        return np.append(tokens, np.int32(self._eos_id))

    def _conversation(self, record: Conversation) -> Encoded:
        if self._template is None or not isinstance(self.tokenizer, ChatTokenizer):
            raise NotImplementedError(
                f"{record.name}: a conversation needs a tokenizer.json or the byte tokenizer, got "
                f"{self.tokenizer.name}; convert it to a tokenizer.json"
            )
        rendered = self._template.render(record)
        located = self.tokenizer.encode_marked(rendered.text)
        return Encoded(located.tokens, _scored(located, rendered))


def make_encoder(tokenizer: str, *, append_eos: bool = False, chat_template: str = "") -> Encoder:
    """Builds an encoder from configuration values.

    Args:
      tokenizer: What `get_tokenizer` takes.
      append_eos: End each document with the tokenizer's end-of-sequence token.
      chat_template: File with the Jinja template of conversations; left empty, the tokenizer's own.

    Returns:
      The encoder.

    Raises:
      FileNotFoundError: The tokenizer or template does not exist.
      ModuleNotFoundError: A package that this kind of tokenizer needs is not installed.
      NotImplementedError: A template for a tokenizer that cannot encode conversations.
      ValueError: An invalid tokenizer or template, or `append_eos` without such a token.
    """
    template = _read_template(chat_template) if chat_template else ""
    return Encoder(get_tokenizer(tokenizer), append_eos=append_eos, chat_template=template)


def _read_template(name: str) -> str:
    path = Path(name).expanduser()
    if not path.is_file():
        missing, hint = nearest_entry(path)
        raise FileNotFoundError(
            f"chat_template must be an existing file, got {name!r} "
            f"({missing.name} is not in {missing.parent}); {hint}"
        )
    return path.read_text(encoding="utf-8")


def _template(tokenizer: Tokenizer, source: str) -> ChatTemplate | None:
    if isinstance(tokenizer, ChatTokenizer):
        if not source:
            return ChatTemplate(tokenizer.chat)
        template = ChatTemplate(dataclasses.replace(tokenizer.chat, templates={"default": source}))
        template.compile()
        return template
    if source:
        raise NotImplementedError(
            f"chat_template needs a tokenizer.json or the byte tokenizer, got {tokenizer.name}; "
            f"convert the tokenizer to a tokenizer.json"
        )
    return None


def _scored(located: Located, rendered: Rendered) -> Bool[np.ndarray, "_"]:
    """Tokens that lie in a scored stretch, in part at least."""
    # A token without width, such as a space that the tokenizer puts first, counts as one wide.
    ends = np.maximum(located.ends, located.starts + 1)
    scored = np.zeros(len(located.tokens), np.bool_)
    for start, end in rendered.scored:
        scored |= (located.starts < end) & (ends > start)
    return scored
