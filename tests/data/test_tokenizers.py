import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farspan.data import ByteTokenizer, get_tokenizer


@given(st.binary())
def test_bytes_round_trip_without_specials(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == list(text)
    assert tokenizer.decode(ids) == text


def test_encoding_is_a_copy_that_may_be_written_to():
    ids = ByteTokenizer().encode(b"abc")
    ids[0] = 0
    assert ids.tolist() == [0, 98, 99]


def test_specials_stand_for_no_text_and_lie_in_the_vocabulary():
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 258
    ids = [tokenizer.bos_id, *b"ab", tokenizer.eos_id, *b"c"]
    assert sorted({tokenizer.bos_id, tokenizer.eos_id}) == [256, 257]
    assert tokenizer.decode(ids) == b"abc"


@pytest.mark.parametrize("bad", [-100, -1, 258])
def test_ids_outside_the_vocabulary_are_not_decoded(bad):
    with pytest.raises(ValueError, match=rf"in \[0, 258\), got {bad}"):
        ByteTokenizer().decode([65, bad])


def test_lookup():
    assert isinstance(get_tokenizer("byte"), ByteTokenizer)
    with pytest.raises(ValueError, match='did you mean "byte"'):
        get_tokenizer("bytes")
