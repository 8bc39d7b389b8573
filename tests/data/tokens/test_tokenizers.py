import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.data.tokens.marks import mark
from farspan.data.tokens.tokenizer_types import ChatTokenizer, Tokenizer
from farspan.data.tokens.tokenizers import ByteTokenizer, get_tokenizer


class TestBytes:
    @given(st.binary())
    def test_bytes_round_trip_without_specials(self, text):
        tokenizer = ByteTokenizer()
        ids = tokenizer.encode(text)
        assert ids.dtype == np.int32
        assert ids.tolist() == list(text)
        assert tokenizer.decode(ids) == text

    def test_encoding_is_a_copy_that_may_be_written_to(self):
        ids = ByteTokenizer().encode(b"abc")
        ids[0] = 0
        assert ids.tolist() == [0, 98, 99]

    def test_specials_stand_for_no_text_and_lie_in_the_vocabulary(self):
        tokenizer = ByteTokenizer()
        assert tokenizer.vocab_size == 258
        ids = [tokenizer.bos_id, *b"ab", tokenizer.eos_id, *b"c"]
        assert sorted({tokenizer.bos_id, tokenizer.eos_id}) == [256, 257]
        assert tokenizer.decode(ids) == b"abc"

    @pytest.mark.parametrize("bad", [-100, -1, 258])
    def test_ids_outside_the_vocabulary_are_not_decoded(self, bad):
        with pytest.raises(ValueError, match=rf"in \[0, 258\), got {bad}"):
            ByteTokenizer().decode([65, bad])

    @given(st.lists(st.one_of(st.text(st.characters(codec="utf-8")), st.sampled_from([256, 257]))))
    def test_marks_become_ids_and_bytes_know_their_character(self, parts):
        text = "".join(part if isinstance(part, str) else mark(part) for part in parts)
        located = ByteTokenizer().encode_marked(text)
        expected = [n for p in parts for n in (p.encode() if isinstance(p, str) else [p])]
        assert located.tokens.tolist() == expected
        spans = zip(located.tokens, located.starts, located.ends, strict=True)
        seen = {}
        for token, start, end in spans:
            seen.setdefault((int(start), int(end)), []).append(int(token))
        for (start, end), tokens in seen.items():
            piece = text[start:end]
            same = [mark(tokens[0])] if tokens[0] >= 256 else [bytes(tokens).decode()]
            assert [piece] == same
        assert sum(end - start for start, end in seen) == len(text)


@pytest.fixture(scope="module")
def sentencepiece_model() -> bytes:
    import io

    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world, hello </s> user", "why because hello"] * 20),
        model_writer=model,
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
    )
    return model.getvalue()


TEXTS = ["hello world", "hé 😀\n\n  x", "", "<|im_end|></s><s><|endoftext|>", "[unused]<think>"]


class TestFiles:
    @pytest.fixture(params=["bpe", "unigram", "sentencepiece"])
    def tokenizer(self, request, tmp_path, save_tokenizer, sentencepiece_model) -> Tokenizer:
        if request.param == "sentencepiece":
            (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model)
            return get_tokenizer(str(tmp_path))
        return get_tokenizer(save_tokenizer(request.getfixturevalue(request.param), tmp_path))

    def test_text_makes_no_special_token_and_batches_equal_single_texts(self, tokenizer):
        assert isinstance(tokenizer, Tokenizer)
        together = tokenizer.encode_batch([text.encode() for text in TEXTS])
        for text, ids in zip(TEXTS, together, strict=True):
            assert ids.dtype == np.int32
            assert ids.tolist() == tokenizer.encode(text.encode()).tolist()
            assert (ids < tokenizer.vocab_size).all()
            if isinstance(tokenizer, ChatTokenizer):
                special = set(tokenizer.chat.special_tokens.values()) - {unknown(tokenizer)}
                assert not special & set(ids.tolist())
            else:
                assert tokenizer.eos_id not in ids

    def test_decoding_refuses_what_is_no_id(self, tokenizer):
        with pytest.raises(ValueError, match=rf"in \[0, {tokenizer.vocab_size}\), got -1"):
            tokenizer.decode([-1])

    def test_known_text_round_trips(self, tokenizer):
        assert tokenizer.decode(tokenizer.encode(b"hello world")) == b"hello world"


def unknown(tokenizer: ChatTokenizer) -> int | None:
    return tokenizer.chat.special_tokens.get("<unk>")


class TestJson:
    @settings(max_examples=30)
    @given(st.text(st.characters(codec="utf-8")))
    def test_byte_level_text_round_trips(self, tmp_path_factory, bpe, save_tokenizer, text):
        folder = tmp_path_factory.getbasetemp() / "round"
        tokenizer = get_tokenizer(save_tokenizer(bpe, folder))
        ids = tokenizer.encode(text.encode())
        assert tokenizer.decode(ids) == text.encode()
        if "<" not in text:
            assert ids.tolist() == bpe.encode(text, add_special_tokens=False).ids

    def test_end_of_sequence_is_read_beside_it(self, tmp_path, bpe, save_tokenizer):
        end = bpe.token_to_id("<|im_end|>")
        text = bpe.token_to_id("<|endoftext|>")
        for eos, expected in (
            ("<|im_end|>", end),
            ({"content": "<|im_end|>", "special": True}, end),
            (None, None),
        ):
            assert get_tokenizer(save_tokenizer(bpe, tmp_path, eos_token=eos)).eos_id == expected
        folder = save_tokenizer(bpe, tmp_path)
        (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
        assert get_tokenizer(folder).eos_id == text

    def test_what_the_file_says_of_length_and_frame_is_left_alone(self, tmp_path, bpe):
        from tokenizers import Tokenizer as Library
        from tokenizers import processors

        framed = Library.from_str(bpe.to_str())
        framed.enable_truncation(2)
        framed.enable_padding(length=50)
        end = ("<|im_end|>", bpe.token_to_id("<|im_end|>"))
        framed.post_processor = processors.TemplateProcessing("$A <|im_end|>", special_tokens=[end])
        framed.save(str(tmp_path / "tokenizer.json"))
        ids = get_tokenizer(str(tmp_path / "tokenizer.json")).encode(b"hello world, why?")
        assert ids.tolist() == bpe.encode("hello world, why?", add_special_tokens=False).ids

    def test_marks_in_text_are_refused(self, tmp_path, bpe, save_tokenizer):
        tokenizer = get_tokenizer(save_tokenizer(bpe, tmp_path))
        with pytest.raises(ValueError, match=r"noncharacters U\+FDD2.* at character 1"):
            tokenizer.encode(f"a{mark(0)}".encode())
        assert tokenizer.decode(tokenizer.encode("\ufdd2x".encode())) == "\ufdd2x".encode()

    def test_name_is_of_the_content(self, tmp_path, bpe, save_tokenizer):
        first, same = (get_tokenizer(save_tokenizer(bpe, tmp_path / n)).name for n in "ab")
        assert first == same
        assert first.startswith("tokenizer.json:")
        spec = json.loads((tmp_path / "a/tokenizer.json").read_text())
        (tmp_path / "a/tokenizer.json").write_text(json.dumps(spec | {"normalizer": None}))
        assert get_tokenizer(str(tmp_path / "a")).name != first

    @pytest.mark.parametrize(
        ("content", "words"),
        [("{", "got another"), ("[]", "no JSON object"), ('{"a": 1}', "it has the fields a")],
    )
    def test_other_files_are_refused(self, tmp_path, content, words):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ValueError, match=words):
            get_tokenizer(str(tmp_path / "tokenizer.json"))

    def test_special_token_with_another_id_than_the_library_gives_it_is_refused(
        self, tmp_path, bpe, save_tokenizer
    ):
        folder = save_tokenizer(bpe, tmp_path)
        spec = json.loads((tmp_path / "tokenizer.json").read_text())
        spec["added_tokens"][2]["id"] += 100
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        with pytest.raises(NotImplementedError, match=r"'<\|im_end\|>' with id"):
            get_tokenizer(folder)


class TestSentencePiece:
    def test_other_file_is_refused(self, tmp_path):
        (tmp_path / "a.model").write_bytes(b"IQ== 0\nIg== 1\n")
        with pytest.raises(ValueError, match=r"must be a SentencePiece model.*a tokenizer\.json"):
            get_tokenizer(str(tmp_path / "a.model"))

    def test_conversations_are_refused(self, tmp_path, sentencepiece_model):
        from farspan.data.document import Conversation
        from farspan.data.tokens.encode import make_encoder

        (tmp_path / "a.model").write_bytes(sentencepiece_model)
        (tmp_path / "t.jinja").write_text("x")
        encoder = make_encoder(str(tmp_path / "a.model"), append_eos=True)
        with pytest.raises(NotImplementedError, match=r"c:1: a conversation needs a tokenizer\.j"):
            encoder.encode(Conversation("c:1", ({"role": "user", "content": "x"},)))
        with pytest.raises(NotImplementedError, match=r"chat_template needs a tokenizer\.json"):
            make_encoder(str(tmp_path / "a.model"), chat_template=str(tmp_path / "t.jinja"))


class TestLookup:
    def test_byte(self):
        assert isinstance(get_tokenizer("byte"), ByteTokenizer)

    @pytest.mark.parametrize("name", ["bytes", "./no/such"])
    def test_missing_path_is_said(self, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        hint = 'did you mean "byte"' if name == "bytes" else ""
        with pytest.raises(FileNotFoundError, match=f'must be "byte" or the path.*{hint}'):
            get_tokenizer(name)
        with pytest.raises(ValueError, match="name one"):
            get_tokenizer("")

    def test_nearest_sibling_is_named(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(FileNotFoundError, match=r"did you mean .*tokenizer\.json"):
            get_tokenizer(str(tmp_path / "tokeniser.json"))

    def test_folder_and_file_without_a_tokenizer_are_refused(self, tmp_path):
        (tmp_path / "vocab.txt").write_text("")
        with pytest.raises(ValueError, match="a folder without one"):
            get_tokenizer(str(tmp_path))
        with pytest.raises(ValueError, match="is neither"):
            get_tokenizer(str(tmp_path / "vocab.txt"))
