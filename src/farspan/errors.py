"""Error messages in one form: the rule, the values that broke it, the remedy."""

import difflib
from collections.abc import Iterable


def unknown_choice(what: str, value: object, choices: Iterable[str]) -> ValueError:
    """Builds the error for a name that is not one of `choices`.

    Args:
      what: What the name stands for, such as `"layout"`.
      value: The name that was given.
      choices: Every valid name.

    Returns:
      A `ValueError` that lists the valid names and points at the nearest one.
    """
    names = sorted(choices)
    near = difflib.get_close_matches(str(value), names, n=1, cutoff=0.4)
    hint = f'; did you mean "{near[0]}"?' if near else ""
    return ValueError(f"{what} must be one of {', '.join(names)}, got {value!r}{hint}")
