"""Builds a loader from configuration values."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from farspan.data.cache.cached_tokens import cached_tokens
from farspan.data.corpus import Corpus, HeldOut, Indices, build_corpus
from farspan.data.loader import Loader, check_arguments
from farspan.data.mixture import Interleave, LengthWeights, Part, read_mixture
from farspan.data.packing import Packing
from farspan.data.progress import ignore
from farspan.data.random_access import Member, RandomAccessLoader
from farspan.data.reading.sources import open_source
from farspan.data.seeds import derive_seed, permutation
from farspan.data.stream import StreamLoader, StreamMember, source_identity
from farspan.data.tokens.encode import Encoder, make_encoder
from farspan.data.windows import WindowReader, WindowSettings


def make_loader(
    data: str,
    *,
    tokenizer: str,
    seq_len: int,
    packing: Packing = "best_fit",
    batch_size: int,
    seed: int,
    streaming: bool = False,
    shuffle_window_rows: int = 1024,
    text_field: str = "text",
    append_eos: bool = False,
    chat_template: str = "",
    eval_data: str = "",
    eval_rows: int = 0,
    cache_dir: str = "",
    progress: Callable[[str], None] = ignore,
) -> Loader:
    """Builds a loader.

    Args:
      data: What `read_mixture` takes: a source, or a .toml file that mixes several.
      tokenizer: What `make_encoder` takes, as `append_eos` and `chat_template`.
      seq_len: Tokens a row.
      packing: How documents share rows; see `pack`.
      batch_size: Rows a batch, over all devices.
      seed: Fixes the held-out rows and the order of every epoch; 0 .. 2**32 - 1.
      streaming: Read and tokenise while training; otherwise that is done first, into the cache.
      shuffle_window_rows: Rows that streaming packs and shuffles together.
      text_field: The field of the text in records.
      append_eos: See `make_encoder`.
      chat_template: See `make_encoder`.
      eval_data: Held-out data, named like `data`; empty: `eval_rows` rows of `data`.
      eval_rows: Rows held out of training; with `eval_data`, rows of that, 0 for all.
      cache_dir: Folder of tokenised data; empty: `user_cache_dir("tokens")`.
      progress: Called about once a second during long work, with what is being done.

    Returns:
      The loader: a `StreamLoader` or a `RandomAccessLoader`.

    Raises:
      ValueError: An argument is out of range, the data are not as they should be, or there are
        fewer training rows than a batch needs.
      OSError: The data cannot be read, or the cache cannot be written.
    """
    check_arguments(seq_len=seq_len, batch_size=batch_size, seed=seed, eval_rows=eval_rows)
    if shuffle_window_rows < 1:
        raise ValueError(
            f"loader: shuffle_window_rows must be at least 1, got {shuffle_window_rows}; use 1 or "
            f"more"
        )
    if streaming and eval_rows and not eval_data:
        raise ValueError(
            f"loader: streaming holds no rows out, got eval_rows={eval_rows} without eval_data; "
            f"name held-out data (--eval-data), or do without streaming"
        )
    encoder = make_encoder(tokenizer, append_eos=append_eos, chat_template=chat_template)
    build = _Builder(encoder, seq_len, packing, batch_size, seed, text_field, cache_dir, progress)
    if streaming:
        return build.stream(data, shuffle_window_rows, build.held_out(eval_data, eval_rows))
    if eval_data:
        return build.random_access(data, 0, build.held_out(eval_data, eval_rows))
    return build.random_access(data, eval_rows, None)


@dataclass(frozen=True)
class _Builder:
    """What every part of a loader is built with."""

    encoder: Encoder
    seq_len: int
    packing: Packing
    batch_size: int
    seed: int
    text_field: str
    cache_dir: str
    progress: Callable[[str], None]

    def random_access(self, data: str, eval_rows: int, held_out: HeldOut | None) -> Loader:
        parts = read_mixture(data, self.text_field)
        numbers = Interleave([part.weight for part in parts]).counts(eval_rows)
        members = [
            Member(part, self._corpus(part, number, held))
            for number, (part, held) in enumerate(zip(parts, numbers, strict=True))
        ]
        if held_out is None:
            held_out = self._held_out([(m.corpus, m.corpus.held_out) for m in members])
        digests = [member.corpus.store.digest for member in members]
        return RandomAccessLoader(
            members,
            held_out=held_out,
            order=self._order(parts, digests, streaming=False, eval_rows=eval_rows),
            vocab_size=self.encoder.vocab_size,
            description=self._description(),
        )

    def stream(self, data: str, window_rows: int, held_out: HeldOut) -> Loader:
        parts = read_mixture(data, self.text_field)
        members: list[StreamMember] = []
        for number, part in enumerate(parts):
            source = open_source(part.data, text_field=part.text_field)
            settings = WindowSettings(
                self.seq_len,
                self.packing,
                window_rows,
                derive_seed(self.seed, "source", number),
                part.length_weights,
            )
            reader = WindowReader(source, self.encoder, settings)
            members.append(StreamMember(part, source, reader))
        identities = [source_identity(member.source) for member in members]
        order = self._order(parts, identities, streaming=True, eval_rows=0)
        return StreamLoader(
            members,
            held_out=held_out,
            order=order
            | {
                "text_field": [part.text_field for part in parts],
                "shuffle_window_rows": window_rows,
            },
            vocab_size=self.encoder.vocab_size,
            description=f"{self._description()}, shuffled in windows of {window_rows:,} rows",
        )

    def held_out(self, eval_data: str, eval_rows: int) -> HeldOut:
        """Rows of other data; none without them."""
        if not eval_data:
            return self._held_out([])
        parts = read_mixture(eval_data, self.text_field)
        wanted = Interleave([part.weight for part in parts]).counts(eval_rows)
        chosen: list[tuple[Corpus, Indices]] = []
        for number, part in enumerate(parts):
            if part.length_weights != LengthWeights():
                raise ValueError(
                    f"loader: held-out documents are seen once each, got length_weights for "
                    f"{part.data} in eval_data; leave them out"
                )
            corpus = self._corpus(part, number, 0)
            rows = corpus.train
            if eval_rows:
                order = permutation(len(rows), derive_seed(self.seed, "eval", number))
                rows = rows[order[: wanted[number]]]
            if len(rows) < max(1, wanted[number]):
                raise ValueError(
                    f"loader: held-out data must have the rows asked for, got {len(rows)} rows of "
                    f"{part.data} for eval_rows={eval_rows}; use fewer eval_rows, a shorter "
                    f"seq_len, or more data"
                )
            chosen.append((corpus, rows))
        return self._held_out(chosen)

    def _held_out(self, rows: Sequence[tuple[Corpus, Indices]]) -> HeldOut:
        return HeldOut(rows, self.seq_len, self.batch_size)

    def _corpus(self, part: Part, number: int, held_out: int) -> Corpus:
        store = cached_tokens(
            open_source(part.data, text_field=part.text_field),
            self.encoder,
            text_field=part.text_field,
            cache_dir=self.cache_dir,
            progress=self.progress,
        )
        self.progress(f"packing {part.data}: {len(store.documents):,} documents")
        return build_corpus(
            store,
            seq_len=self.seq_len,
            packing=self.packing,
            seed=derive_seed(self.seed, "source", number),
            length_weights=part.length_weights,
            held_out=held_out,
        )

    def _order(
        self, parts: Sequence[Part], digests: Sequence[str], *, streaming: bool, eval_rows: int
    ) -> dict[str, Any]:
        """Everything that the order of the batches depends on, as JSON values."""
        mixture = [
            {"weight": part.weight, **{k: list(v) for k, v in asdict(part.length_weights).items()}}
            for part in parts
        ]
        return {
            "data": list(digests),
            "mixture": mixture,
            "tokenizer": self.encoder.name,
            "seq_len": self.seq_len,
            "packing": self.packing,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "eval_rows": eval_rows,
            "streaming": streaming,
        }

    def _description(self) -> str:
        return f"tokenizer {self.encoder.tokenizer.name}, vocabulary {self.encoder.vocab_size:,}"
