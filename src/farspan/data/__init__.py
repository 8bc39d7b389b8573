"""Text to batches: sources, tokenizers, packing, and a resumable loader. NumPy only."""

from farspan.data.baseline import unigram_loss
from farspan.data.batch import Batch, build_batch, validate_ids
from farspan.data.document import Document
from farspan.data.loader import Loader, make_loader
from farspan.data.packing import PackReport, Piece, pack
from farspan.data.sources import load_documents
from farspan.data.tokenizers import ByteTokenizer, Tokenizer, get_tokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Document",
    "Loader",
    "PackReport",
    "Piece",
    "Tokenizer",
    "build_batch",
    "get_tokenizer",
    "load_documents",
    "make_loader",
    "pack",
    "unigram_loss",
    "validate_ids",
]
