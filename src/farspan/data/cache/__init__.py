"""Tokens of a source, made once and kept on disk."""
