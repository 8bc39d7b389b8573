"""Conversations to text by a chat template, and which of the text the assistant says."""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from farspan.data.document import Conversation
from farspan.data.tokens.jinja import compile_template
from farspan.data.tokens.marks import (
    LETTERS,
    RESERVED,
    SCORED_END,
    SCORED_START,
    either,
    letters,
    mark,
)
from farspan.data.tokens.tokenizer_types import ChatFormat

_ASSISTANT = "assistant"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REMEDY = (
    "put {% generation %} and {% endgeneration %} around what the assistant says in the template"
)


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
      text: The text, with `marks.mark` for special tokens.
      scored: (start, end) of each stretch that the assistant says, in characters of `text`.
    """

    text: str
    scored: tuple[tuple[int, int], ...]


class ChatTemplate:
    """Renders conversations.

    What the assistant says is what the template puts between `{% generation %}` and
    `{% endgeneration %}`. In a template without them each of its turns is found by rendering the
    conversation up to it: from the prompt for the turn to the special token that ends it, or the
    end of the turn where none does.

    Only the template's own text makes special tokens; in messages their names are text.

    Args:
      chat: The templates and special tokens.

    Attributes:
      digest: Differs where the text of a conversation may.
    """

    def __init__(self, chat: ChatFormat):
        self._chat = chat
        self._compiled: dict[str, Any] = {}
        self._special = either(chat.special_tokens)
        self._names = {number: text for text, number in chat.special_tokens.items()}
        self._final = re.compile(
            f"[{SCORED_START}{SCORED_END}]|{LETTERS.pattern}|{self._special.pattern}"
        )
        values = json.dumps(asdict(chat), sort_keys=True).encode()
        self.digest = hashlib.blake2b(values, digest_size=16).hexdigest()

    def render(self, conversation: Conversation) -> Rendered:
        """Renders a conversation.

        Args:
          conversation: Its text may hold anything but the noncharacters U+FDD0 to U+FDD5.

        Returns:
          The text, and what of it is scored: nothing if the assistant says nothing.

        Raises:
          ValueError: There is no template, it is invalid or refuses the conversation, or does not
            show where the assistant speaks; the message names the conversation.
        """
        templates = self._chat.templates
        kind = "tool_use" if conversation.tools and "tool_use" in templates else "default"
        if kind not in templates:
            raise ValueError(
                f"{conversation.name}: a conversation needs a chat template, got a tokenizer "
                f"without one; set chat_template to the file of one"
            )
        messages = [self._as_text(conversation.name, each) for each in conversation.messages]
        tools = self._as_text(conversation.name, conversation.tools)
        render = functools.partial(self._render, conversation.name, kind, tools)
        if _GENERATION.search(templates[kind]):
            return self._finish(render(messages))
        return self._finish(self._mark_turns(conversation.name, messages, render))

    def compile(self) -> None:
        """Checks the templates.

        Raises:
          ValueError: One is invalid.
        """
        for kind in self._chat.templates:
            self._template(kind)

    def _template(self, kind: str) -> Any:
        if kind not in self._compiled:
            self._compiled[kind] = compile_template(self._chat.templates[kind])
        return self._compiled[kind]

    def _render(
        self, name: str, kind: str, tools: object, messages: list[Any], prompt: bool = False
    ) -> str:
        template = self._template(kind)
        try:
            return template.render(
                **self._chat.named_tokens,
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # a template may fail in any way that Python can
            raise ValueError(
                f"{name}: the chat template must take the conversation, got {error} "
                f"({type(error).__name__}); correct the conversation, or set chat_template to "
                f"another template"
            ) from error

    def _mark_turns(self, name: str, messages: list[Any], render: Callable[..., str]) -> str:
        """Renders messages with borders around the assistant's turns."""
        whole = render(messages)
        parts: list[str] = []
        done = 0
        for index, message in enumerate(messages):
            if message["role"] == _ASSISTANT:
                before = render(messages[:index], prompt=True)
                after = render(messages[: index + 1])
                _check_prefix(name, index, before, whole)
                _check_prefix(name, index, before, after)
                start, end = len(before), self._end_of_turn(name, index, len(before), after, whole)
                parts += [whole[done:start], SCORED_START, whole[start:end], SCORED_END]
                done = end
        return "".join([*parts, whole[done:]])

    def _end_of_turn(self, name: str, index: int, start: int, after: str, whole: str) -> int:
        """Finds where a turn ends in the whole, given it as the last of a conversation.

        Some templates write a turn otherwise once it is not the last one, but they end it with the
        same special token, which no message can hold.
        """
        closing, end = None, len(after)
        for found in self._special.finditer(after, start):
            # Only white space may follow it: that is not for the assistant to say.
            if not after[found.end() :].strip():
                closing, end = found[0], found.end()
        names = [found[0] for found in self._special.finditer(after, start, end)]
        if closing and names.count(closing) == 1:
            ends = (m.end() for m in self._special.finditer(whole, start) if m[0] == closing)
            return next(ends, end)
        _check_prefix(name, index, after, whole)
        return end

    def _as_text(self, name: str, value: object) -> Any:
        """Puts what is no markup for the names of special tokens in all texts of a value."""
        if isinstance(value, str):
            if found := RESERVED.search(value):
                raise ValueError(
                    f"{name}: a conversation must not hold the noncharacters U+FDD0 to U+FDD5, got "
                    f"U+{ord(found[0]):04X}; remove it"
                )
            ids = self._chat.special_tokens
            return self._special.sub(lambda found: letters(ids[found[0]]), value)
        if isinstance(value, dict):
            items = cast("dict[str, object]", value).items()
            return {key: self._as_text(name, item) for key, item in items}
        if isinstance(value, list | tuple):
            return [self._as_text(name, item) for item in cast("Sequence[object]", value)]
        return value

    def _finish(self, text: str) -> Rendered:
        """Puts marks for special tokens, and takes borders out."""
        parts: list[str] = []
        scored: list[tuple[int, int]] = []
        length = done = start = 0
        for found in self._final.finditer(text):
            before, part = text[done : found.start()], ""
            done = found.end()
            length += len(before)
            if found[0] == SCORED_START:
                start = length
            elif found[0] == SCORED_END:
                scored.append((start, length))
            elif found["letters"]:
                part = self._names[int(found["letters"])]
            else:
                part = mark(self._chat.special_tokens[found[0]])
            length += len(part)
            parts += [before, part]
        return Rendered("".join([*parts, text[done:]]), tuple(scored))


def _check_prefix(name: str, index: int, start: str, whole: str) -> None:
    if whole.startswith(start):
        return
    pairs = enumerate(zip(start, whole, strict=False))
    place = next((n for n, (a, b) in pairs if a != b), min(len(start), len(whole)))
    raise ValueError(
        f"{name}: a chat template without {{% generation %}} must write the start of a "
        f"conversation as it writes it in the whole, or the assistant's turns cannot be found, got "
        f"at message {index + 1} {start[place : place + 20]!r} for {whole[place : place + 20]!r}; "
        f"{_REMEDY}"
    )
