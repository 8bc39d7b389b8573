"""Layouts: which tokens does each device hold?"""

from farspan.layouts.base import (
    LAYOUTS,
    Balanced,
    Contiguous,
    Layout,
    Striped,
    Zigzag,
    get_layout,
)

__all__ = ["LAYOUTS", "Balanced", "Contiguous", "Layout", "Striped", "Zigzag", "get_layout"]
