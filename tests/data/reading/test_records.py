"""What makes a record a conversation, and which ones are refused."""

import pytest

from farspan.data.document import Conversation, Document
from farspan.data.reading.records import Place, to_record

PLACE = Place("a:3", "/d/a:3", "each row must have")


def record(**fields):
    return to_record(PLACE, fields, "text")


def test_messages_come_before_text_whatever_else_the_record_has():
    message = {"role": "user", "content": "hi", "name": "Ann"}
    assert record(text="x", messages=[message]) == Conversation("a:3", (message,))
    assert record(text="x", messages=None) == Document("a:3", b"x")


def test_sharegpt_speakers_become_roles():
    turns = [("system", "s"), ("human", "h"), ("gpt", "g"), ("user", "u"), ("tool", "t")]
    found = record(conversations=[{"from": who, "value": text} for who, text in turns])
    roles = ["system", "user", "assistant", "user", "tool"]
    expected = [{"role": r, "content": t} for r, (_, t) in zip(roles, turns, strict=True)]
    assert found == Conversation("a:3", tuple(expected))


def test_content_in_parts_is_joined_and_calls_need_no_content():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    found = record(messages=[{"role": "user", "content": parts}, call])
    assert found.messages == ({"role": "user", "content": "ab"}, call)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, '"messages" must hold at least one message, got none'),
        ({"messages": ["hi"]}, 'message 1 must be an object with a string "role", got a string'),
        ({"messages": [{"content": "x"}]}, r"got the fields \['content'\]; write"),
        ({"messages": [{"role": 1, "content": "x"}]}, 'with a string "role"'),
        ({"messages": [{"role": "user"}]}, 'must have text in "content", got null'),
        ({"messages": [{"role": "user", "content": 3}]}, "got a number"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            'must have text in "content", got a list',
        ),
        ({"messages": [{"role": "user", "content": "\0"}]}, "without NUL"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "half a surrogate pair"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "[]"}, "must be a list"),
        ({"conversations": [{"from": "bing", "value": "x"}]}, "one of human, .*got 'bing'"),
        ({"conversations": [{"from": "human"}]}, 'text in "content", got null'),
        ({"other": "x"}, r'a string "text" or a list "messages", got the fields \[\'other\'\]'),
        ({"text": b"x"}, 'got bytes in "text"'),
    ],
)
def test_what_is_no_record_is_refused_with_its_place(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        record(**fields)
    assert str(error.value).startswith("/d/a:3: ")
