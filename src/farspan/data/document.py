"""The units that everything in `farspan.data` starts from: a text, or a conversation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Document:
    """One text that attention may look across from end to end.

    Attributes:
      name: Where it came from, for messages: `asyncio`, `notes/a.txt`, `web.jsonl:7`.
      text: The UTF-8 bytes.
    """

    name: str
    text: bytes


@dataclass(frozen=True)
class Conversation:
    """Messages between roles, which a chat template turns into text.

    Attributes:
      name: Where it came from, for messages: `chats.jsonl:7`.
      messages: At least one; each has a string `role`, mostly a `content`, and whatever else the
        template uses.
      tools: What the assistant may call, as the template expects it; None if the record has none.
    """

    name: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Any, ...] | None = None


Record = Document | Conversation
