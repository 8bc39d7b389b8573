"""Real tokenizers, trained in a moment, and loaders that end with their test."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from farspan.data import Loader, make_loader

_TEXT = ["hello world, the assistant says hello", "user asks: why? because.", "system"] * 9


@pytest.fixture(scope="session")
def chatml() -> str:
    """A template without generation blocks."""
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' "
        "+ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    """Like Qwen's or Llama 3's: special tokens beside the vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_TEXT, trainer)
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(mark) for mark in marks])
    tokenizer.add_tokens(["<think>"])
    return tokenizer


@pytest.fixture(scope="session")
def unigram() -> Tokenizer:
    """Like Llama 2's: special tokens in the vocabulary, a space put before the text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=60,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        initial_alphabet=list("<s>/[]INT"),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def save_tokenizer() -> Callable[..., str]:
    """Writes a tokenizer's folder, with a tokenizer_config.json; returns its path."""

    def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> str:
        folder.mkdir(exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return str(folder)

    return save


@pytest.fixture
def open_loader() -> Iterator[Callable[..., Loader]]:
    """`make_loader`, whose loaders are closed after the test."""
    with contextlib.ExitStack() as opened:

        def make(*args: Any, **options: Any) -> Loader:
            return opened.enter_context(contextlib.closing(make_loader(*args, **options)))

        yield make
