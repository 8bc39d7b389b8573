"""Constants that every layer shares."""

PAD_SEGMENT_ID = 0
"""Segment id of padding, which never attends, is never attended to, and yields 0 and gradient 0."""

IGNORE_LABEL = -100
"""Label of a token whose prediction does not enter the loss."""
