"""Markup of rendered conversations that no text can forge.

Unicode sets U+FDD0 to U+FDEF aside for use inside programs: they are no characters and stand in no
text that is meant for others. A special token is a mark made of them, so the letters `<|im_end|>`
in a text are letters; and so are the borders of what the loss may be on.
"""

import re
from collections.abc import Iterable

SCORED_START = "\ufdd0"
SCORED_END = "\ufdd1"
_MARK = ("\ufdd2", "\ufdd3")
_LETTERS = ("\ufdd4", "\ufdd5")

RESERVED = re.compile("[\ufdd0-\ufdd5]")
MARK = re.compile(f"{_MARK[0]}([0-9]+){_MARK[1]}")
LETTERS = re.compile(f"{_LETTERS[0]}(?P<letters>[0-9]+){_LETTERS[1]}")


def mark(token_id: int) -> str:
    """The mark of a special token; `MARK` finds it."""
    return f"{_MARK[0]}{token_id}{_MARK[1]}"


def letters(token_id: int) -> str:
    """What stands for the name of a special token in a message, as text; `LETTERS` finds it."""
    return f"{_LETTERS[0]}{token_id}{_LETTERS[1]}"


def either(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of `texts`, the longest where several begin."""
    choices = [re.escape(text) for text in sorted(texts, key=len, reverse=True)]
    return re.compile("|".join(choices) or "(?!)")
