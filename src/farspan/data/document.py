"""The unit of text everything in `farspan.data` starts from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One text that attention may look across from end to end.

    Attributes:
      name: Where it came from, for messages: `asyncio`, `notes/a.txt`, `chats.jsonl:7`.
      text: The UTF-8 bytes.
    """

    name: str
    text: bytes
