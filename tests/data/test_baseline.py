import math

import numpy as np
import pytest

from farspan.data import build_batch, make_loader, pack, unigram_loss


def ids(*values):
    return np.array(values, np.int32)


def test_uniform_and_constant_text():
    assert unigram_loss(np.arange(8, dtype=np.int32)) == pytest.approx(math.log(8))
    assert unigram_loss(np.full((3, 4), 7, np.int32)) == 0


def test_is_the_mean_log_loss_of_the_frequencies():
    tokens = ids(0, 0, 0, 5)
    expected = -(3 * math.log(3 / 4) + math.log(1 / 4)) / 4
    assert unigram_loss(tokens) == pytest.approx(expected)
    assert unigram_loss([tokens[:1], tokens[1:]]) == pytest.approx(expected)


def test_padding_is_no_token():
    # Padding holds id 0, which here is a token of the text as well.
    documents = [ids(0, 0, 0, 5)]
    rows, _ = pack([4], 16)
    batch = build_batch(rows, documents, 16)
    assert unigram_loss(batch) == unigram_loss([batch]) == unigram_loss(documents)


def test_of_a_loaders_tokens_and_held_out_rows(tmp_path):
    (tmp_path / "a.txt").write_text("abababab" * 8)
    loader = make_loader(
        str(tmp_path),
        tokenizer="byte",
        seq_len=8,
        batch_size=3,
        seed=0,
        eval_rows=4,
        cache_dir=str(tmp_path / ".cache"),
    )
    assert loader.unigram_loss == pytest.approx(math.log(2))
    assert unigram_loss(loader.eval_batches()) == pytest.approx(math.log(2))


@pytest.mark.parametrize("data", [[], [ids()], ids()])
def test_no_tokens(data):
    with pytest.raises(ValueError, match="there must be a token"):
        unigram_loss(data)


def test_labels_are_no_tokens():
    with pytest.raises(ValueError, match="got -100; pass tokens, not labels"):
        unigram_loss(ids(1, -100))
