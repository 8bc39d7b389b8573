"""The fields of one JSON line, table row or stored record become a document or a conversation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from farspan.data.document import Conversation, Document, Record

_MESSAGES = "messages"
_SHAREGPT = "conversations"
_TOOLS = "tools"
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}


def record_fields(text_field: str) -> tuple[str, ...]:
    """Names the fields that are read where the text is in `text_field`; others are ignored."""
    return (text_field, _MESSAGES, _SHAREGPT, _TOOLS)


@dataclass(frozen=True)
class Place:
    """Where a record stands, for its name and for messages.

    Attributes:
      name: The record's name, unique in the source: `web.jsonl:7`.
      where: File and line, or file and row: `/data/web.jsonl:7`.
      form: What each record must be, up to the fields: `each row must have`.
    """

    name: str
    where: str
    form: str

    def rule(self, text_field: str) -> str:
        """States what a record must be."""
        return f'{self.where}: {self.form} a string "{text_field}" or a list "{_MESSAGES}"'


def to_record(place: Place, fields: Mapping[str, object], text_field: str) -> Record:
    """Makes a record of its fields.

    A list `messages` makes a conversation, with `tools` if there are any; so does a list
    `conversations` of `from` and `value` (ShareGPT). All else is a document.

    Args:
      place: Where the record stands.
      fields: Field name to JSON value.
      text_field: Name of the field that holds a document's text.

    Returns:
      The record; the text of a document may be empty.

    Raises:
      ValueError: There is no such field, or it holds something else; the message gives the place.
    """
    for name in (_MESSAGES, _SHAREGPT):
        value = fields.get(name)
        if isinstance(value, list):
            return _conversation(place, name, cast("list[object]", value), fields.get(_TOOLS))
    rule = place.rule(text_field)
    if text_field not in fields:
        raise ValueError(
            f"{rule}, got the fields {sorted(fields)}; "
            f"set text_field to the one that holds the document"
        )
    text = fields[text_field]
    if not isinstance(text, str):
        raise ValueError(f'{rule}, got {kind(text)} in "{text_field}"; write it as a string')
    return Document(place.name, _encode(text, rule))


def kind(value: object) -> str:
    """Names the kind of a JSON value, for messages: "a list"."""
    names = {
        "NoneType": "null",
        "list": "a list",
        "dict": "an object",
        "str": "a string",
        "bool": "a boolean",
        "bytes": "bytes",
    }
    name = type(value).__name__
    return "a number" if name in {"int", "float"} else names.get(name, name)


def _conversation(place: Place, field: str, items: list[object], tools: object) -> Conversation:
    where = f'{place.where}: "{field}"'
    if not items:
        raise ValueError(f"{where} must hold at least one message, got none; leave the record out")
    messages = tuple(_message(f"{where}, message {n}", item) for n, item in enumerate(items, 1))
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f'{place.where}: "tools" must be a list, got {kind(tools)}; write it so')
    for text in _strings([messages, tools]):
        _encode(text, f"{where} must hold text")
    return Conversation(place.name, messages, tuple(cast("list[object]", tools)) if tools else None)


def _message(where: str, item: object) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise ValueError(f'{where} must be an object with a string "role", got {kind(item)}')
    message = cast("dict[str, Any]", item)
    if "from" in message and "role" not in message:
        speaker = message["from"]
        if speaker not in _SHAREGPT_ROLES:
            raise ValueError(
                f'{where}: "from" must be one of {", ".join(_SHAREGPT_ROLES)}, got {speaker!r}; '
                f'rename it, or write the message with "role" and "content"'
            )
        return _with_text(
            where, {"role": _SHAREGPT_ROLES[speaker], "content": message.get("value")}
        )
    if not isinstance(message.get("role"), str):
        raise ValueError(
            f'{where} must be an object with a string "role", got the fields {sorted(message)}; '
            f'write {{"role": "user", "content": "..."}}'
        )
    return _with_text(where, message)


def _with_text(where: str, message: dict[str, Any]) -> Mapping[str, Any]:
    """Checks the content of a message, and joins content that comes in several texts."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return message
    parts = cast("list[Any]", content) if isinstance(content, list) else [content]
    values = [part.get("text") for part in parts if isinstance(part, dict)]
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) == len(parts):
        return message | {"content": "".join(texts)}
    raise ValueError(
        f'{where} must have text in "content", got {kind(content)}; write it as a string, or leave '
        f"the record out"
    )


def _encode(text: str, rule: str) -> bytes:
    if "\0" in text:
        raise ValueError(f"{rule} without NUL characters; remove \\u0000 from it")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{rule}, got half a surrogate pair at character {error.start}; "
            f"escape the whole pair or write the character itself"
        ) from error


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in cast("dict[str, object]", value).items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[object]", value):
            yield from _strings(item)
