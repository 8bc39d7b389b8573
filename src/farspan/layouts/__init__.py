"""Layouts: which tokens does each device hold?"""

from farspan.layouts.base import LAYOUTS, Contiguous, Layout, Striped, Zigzag, get_layout

__all__ = ["LAYOUTS", "Contiguous", "Layout", "Striped", "Zigzag", "get_layout"]
