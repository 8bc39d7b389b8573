"""Models: plain functions over pytrees, given an attention function and no mesh."""

from farspan.models.config import DecoderConfig

__all__ = ["DecoderConfig"]
