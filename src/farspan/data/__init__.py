"""Text to batches: sources, tokenizers, token cache, packing, resumable loaders. NumPy only."""

from farspan.data.baseline import entropy, unigram_loss
from farspan.data.batch import Batch, build_batch, validate_ids
from farspan.data.cache.cached_tokens import cached_tokens
from farspan.data.cache.store import TokenStore
from farspan.data.corpus import Corpus, HeldOut, build_corpus
from farspan.data.counts import Counts
from farspan.data.document import Conversation, Document, Record
from farspan.data.loader import Loader
from farspan.data.make import make_loader
from farspan.data.mixture import Interleave, LengthWeights, Part, read_mixture
from farspan.data.packing import Packing, PackReport, Piece, Rows, pack
from farspan.data.random_access import RandomAccessLoader
from farspan.data.reading.sources import Shard, Source, open_source
from farspan.data.stream import StreamLoader
from farspan.data.tokens.encode import Encoded, Encoder, make_encoder
from farspan.data.tokens.tokenizers import ByteTokenizer, Tokenizer, get_tokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Conversation",
    "Corpus",
    "Counts",
    "Document",
    "Encoded",
    "Encoder",
    "HeldOut",
    "Interleave",
    "LengthWeights",
    "Loader",
    "PackReport",
    "Packing",
    "Part",
    "Piece",
    "RandomAccessLoader",
    "Record",
    "Rows",
    "Shard",
    "Source",
    "StreamLoader",
    "TokenStore",
    "Tokenizer",
    "build_batch",
    "build_corpus",
    "cached_tokens",
    "entropy",
    "get_tokenizer",
    "make_encoder",
    "make_loader",
    "open_source",
    "pack",
    "read_mixture",
    "unigram_loss",
    "validate_ids",
]
