"""Documents and conversations as ids: what is scored, and that no text can forge markup."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farspan.data.document import Conversation, Document
from farspan.data.tokens.encode import Encoder, make_encoder
from farspan.data.tokens.tokenizers import ByteTokenizer

TURNS = [
    ("system", "be kind"),
    ("user", "hé 😀?"),
    ("assistant", " hello <think> wörld 😀\n"),
    ("user", "why"),
    ("assistant", "because."),
    ("user", "hello"),
]


def chat(*turns: tuple[str, str], **more) -> Conversation:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Conversation("c.jsonl:3", messages, **more)


def scored(encoder: Encoder, conversation: Conversation) -> list[tuple[bytes, int]]:
    """Text and last id of each stretch of scored tokens."""
    encoded = encoder.encode(conversation)
    assert encoded.scored is not None
    edges = np.diff(np.concatenate([[0], encoded.scored.astype(int), [0]]))
    runs = zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)
    decode = encoder.tokenizer.decode
    return [(decode(encoded.tokens[a:b]), int(encoded.tokens[b - 1])) for a, b in runs]


def decoded(encoder: Encoder, conversation: Conversation) -> bytes:
    return encoder.tokenizer.decode(encoder.encode(conversation).tokens)


@pytest.fixture(scope="module")
def bpe_path(tmp_path_factory, bpe, save_tokenizer, chatml) -> str:
    folder = tmp_path_factory.mktemp("bpe")
    return save_tokenizer(bpe, folder, chat_template=chatml, eos_token="<|im_end|>")


@pytest.fixture(params=["byte", "bpe"])
def encoder(request, bpe_path) -> Encoder:
    return make_encoder("byte" if request.param == "byte" else bpe_path)


class TestConversations:
    def test_assistant_turns_and_the_tokens_that_end_them_are_scored(self, encoder):
        end = encoder.tokenizer.chat.special_tokens["<|im_end|>"]
        expected = [(" hello <think> wörld 😀\n".encode(), end), (b"because.", end)]
        assert scored(encoder, chat(*TURNS)) == expected
        text = "".join(f"{role}\n{content}\n" for role, content in TURNS)
        assert decoded(encoder, chat(*TURNS)) == text.encode()

    def test_ids_are_those_of_the_library_for_the_rendered_text(self, bpe_path, bpe):
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in TURNS)
        expected = bpe.encode(text, add_special_tokens=False).ids
        assert make_encoder(bpe_path).encode(chat(*TURNS)).tokens.tolist() == expected

    @settings(max_examples=30)
    @given(
        st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "\n", "assistant", "a", "<", "é"]))
    )
    def test_no_message_can_forge_markup(self, bpe_path, parts):
        forged = "".join(parts)
        for encoder in (make_encoder("byte"), make_encoder(bpe_path)):
            end = encoder.tokenizer.chat.special_tokens["<|im_end|>"]
            conversation = chat(("user", forged), ("assistant", f"x{forged}"))
            assert scored(encoder, conversation) == [(f"x{forged}".encode(), end)]
            tokens = encoder.encode(conversation).tokens
            special = np.isin(tokens, list(encoder.tokenizer.chat.special_tokens.values()))
            assert special.sum() == 4
            assert (
                decoded(encoder, conversation) == f"user\n{forged}\nassistant\nx{forged}\n".encode()
            )

    def test_without_assistant_nothing_is_scored(self, encoder):
        encoded = encoder.encode(chat(*TURNS[:2]))
        assert len(encoded.tokens) > 0
        assert not encoded.scored.any()

    def test_generation_blocks_say_what_is_scored(self, tmp_path, bpe_path):
        template = (
            "{% for m in messages -%}\n"
            "  {% if m.role == 'assistant' %}\n"
            "A:{% generation %} {{ m.content | trim }}<|im_end|>{% endgeneration %}\n\n"
            "  {%- else %}\n"
            "U: {{ m.content }}\n"
            "  {% endif %}\n"
            "{% endfor %}"
        )
        (tmp_path / "t.jinja").write_text(template)
        encoder = make_encoder(bpe_path, chat_template=str(tmp_path / "t.jinja"))
        conversation = chat(("user", "x"), ("assistant", " y "), ("user", "z"), ("assistant", "w"))
        end = encoder.tokenizer.eos_id
        assert scored(encoder, conversation) == [(b" y", end), (b" w", end)]
        assert decoded(encoder, conversation) == b"U: x\nA: yU: z\nA: w"

    def test_token_over_the_border_is_scored(self, tmp_path, bpe_path):
        (tmp_path / "t.jinja").write_text("a {% generation %}world{% endgeneration %}")
        encoder = make_encoder(bpe_path, chat_template=str(tmp_path / "t.jinja"))
        assert [text for text, _ in scored(encoder, chat(("user", "x")))] == [b" world"]

    def test_turn_that_is_written_otherwise_when_it_is_the_last_is_found_by_its_end(
        self, tmp_path, bpe_path
    ):
        template = (
            "{% for m in messages %}<|im_start|>{{ m.role + '\\n' }}"
            "{% if m.role == 'assistant' and loop.last %}<think>{% endif %}"
            "{{ m.content }}<|im_end|>{{ '\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>{{ 'assistant\\n' }}{% endif %}"
        )
        (tmp_path / "t.jinja").write_text(template)
        encoder = make_encoder(bpe_path, chat_template=str(tmp_path / "t.jinja"))
        turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "<|im_end|>d")]
        end = encoder.tokenizer.eos_id
        assert scored(encoder, chat(*turns)) == [(b"b", end), (b"<think><|im_end|>d", end)]
        assert scored(encoder, chat(*turns[:2])) == [(b"<think>b", end)]

    def test_template_that_writes_earlier_turns_otherwise_needs_generation_blocks(self, tmp_path):
        template = "{% for m in messages %}{{ m.content if loop.last else '-' }};{% endfor %}"
        (tmp_path / "t.jinja").write_text(template)
        encoder = make_encoder("byte", chat_template=str(tmp_path / "t.jinja"))
        with pytest.raises(ValueError, match=r"c\.jsonl:3: .*message 2 'xx;'.*put {% generation"):
            encoder.encode(chat(("user", "xx"), ("assistant", "y")))

    def test_space_put_first_and_tokens_of_the_vocabulary(self, tmp_path, save_tokenizer, unigram):
        template = (
            "{% for m in messages %}{% if m.role == 'user' %}"
            "{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
            "{% else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"
        )
        name = save_tokenizer(
            unigram,
            tmp_path / "uni",
            chat_template=template,
            bos_token={"content": "<s>", "lstrip": False},
            eos_token="</s>",
        )
        encoder = make_encoder(name)
        assert scored(encoder, chat(("user", "why"), ("assistant", "hello")))[0] == (b"hello ", 2)
        text = "<s>[INST] why [/INST] hello </s>"
        expected = unigram.encode(text, add_special_tokens=False).ids
        conversation = chat(("user", "why"), ("assistant", "hello"))
        assert encoder.encode(conversation).tokens.tolist() == expected
        forged = encoder.encode(chat(("user", "</s><s>"), ("assistant", "</s>"))).tokens
        assert [n for n in forged.tolist() if n in (1, 2)] == [1, 2]

    def test_tools_reach_the_template(self, tmp_path, bpe, save_tokenizer):
        templates = [
            {"name": "default", "template": "{% generation %}none{% endgeneration %}"},
            {"name": "tool_use", "template": "{{ tools[0] | tojson }}"},
        ]
        folder = save_tokenizer(bpe, tmp_path / "tools", chat_template=templates)
        encoder = make_encoder(folder)
        tools = ({"name": "<é>", "n": 1},)
        assert decoded(encoder, chat(("user", "x"))) == b"none"
        with_tools = chat(("user", "x"), tools=tools)
        assert decoded(encoder, with_tools) == '{"name": "<é>", "n": 1}'.encode()

    def test_template_file_beside_the_tokenizer_comes_first(
        self, tmp_path, bpe, save_tokenizer, chatml
    ):
        folder = save_tokenizer(bpe, tmp_path / "file", chat_template=chatml)
        (tmp_path / "file/chat_template.jinja").write_text("{{ messages[0].content }}!\n")
        assert decoded(make_encoder(folder), chat(("user", "x"))) == b"x!"

    def test_the_day_is_always_the_same(self, tmp_path):
        (tmp_path / "t.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
        encoder = make_encoder("byte", chat_template=str(tmp_path / "t.jinja"))
        assert decoded(encoder, chat(("user", "x"))) == b"26 Jul 2024"

    @pytest.mark.parametrize(
        ("template", "words"),
        [
            ("{{ raise_exception('no system') }}", r"c\.jsonl:3: .*got no system"),
            ("{{ messages[0].nothing.at.all }}", r"c\.jsonl:3: .*UndefinedError"),
            ("{{ messages.append(1) }}", r"c\.jsonl:3: .*SecurityError"),
            ("{{ ''.__class__.__mro__ }}", r"c\.jsonl:3: .*SecurityError"),
        ],
    )
    def test_what_a_template_refuses_is_said(self, tmp_path, template, words):
        (tmp_path / "t.jinja").write_text(template)
        encoder = make_encoder("byte", chat_template=str(tmp_path / "t.jinja"))
        with pytest.raises(ValueError, match=words):
            encoder.encode(chat(("user", "x")))

    def test_noncharacters_are_refused(self, encoder):
        with pytest.raises(ValueError, match=r"c\.jsonl:3: .*got U\+FDD2"):
            encoder.encode(chat(("user", "\ufdd2256\ufdd3")))

    def test_the_byte_template_has_no_place_for_tools(self):
        with pytest.raises(ValueError, match="no place for tools; set chat_template"):
            make_encoder("byte").encode(chat(("user", "x"), tools=({"name": "f"},)))

    def test_without_template_the_remedy_is_named(self, tmp_path, bpe, save_tokenizer):
        encoder = make_encoder(save_tokenizer(bpe, tmp_path / "none"))
        with pytest.raises(ValueError, match=r"c\.jsonl:3: .*set chat_template"):
            encoder.encode(chat(("user", "x")))


class TestDocuments:
    def test_append_eos_ends_documents_that_have_text(self, bpe_path, bpe):
        for name, eos in (("byte", 257), (bpe_path, bpe.token_to_id("<|im_end|>"))):
            encoder = make_encoder(name, append_eos=True)
            plain = make_encoder(name)
            texts = ["hello", "", "wörld"]
            records = [Document(str(n), text.encode()) for n, text in enumerate(texts)]
            ended = [list(each.tokens) for each in encoder.encode_batch(records)]
            without = [list(each.tokens) for each in plain.encode_batch(records)]
            assert ended == [[*without[0], eos], [], [*without[2], eos]]

    def test_batches_equal_single_records_in_order(self, encoder):
        records = [Document("a", b"hello"), chat(*TURNS), Document("b", b""), Document("c", b"why")]
        together = encoder.encode_batch(records)
        for one, record in zip(together, records, strict=True):
            alone = encoder.encode(record)
            assert one.tokens.tolist() == alone.tokens.tolist()
            assert one.tokens.dtype == np.int32
            assert (one.scored is None) == isinstance(record, Document)

    def test_append_eos_needs_such_a_token(self, tmp_path, bpe, save_tokenizer):
        folder = save_tokenizer(bpe, tmp_path / "none")
        with pytest.raises(ValueError, match="append_eos needs a tokenizer with an end"):
            make_encoder(folder, append_eos=True)


class TestName:
    def test_holds_all_that_changes_the_ids(self, tmp_path, bpe_path, bpe, save_tokenizer, chatml):
        (tmp_path / "t.jinja").write_text("{{ messages[0].content }}")
        other = save_tokenizer(bpe, tmp_path / "o", chat_template=chatml, bos_token="<|im_end|>")
        names = [
            make_encoder("byte").name,
            make_encoder("byte", append_eos=True).name,
            make_encoder("byte", chat_template=str(tmp_path / "t.jinja")).name,
            make_encoder(bpe_path).name,
            make_encoder(bpe_path, append_eos=True).name,
            make_encoder(bpe_path, chat_template=str(tmp_path / "t.jinja")).name,
            make_encoder(other).name,
        ]
        assert len(set(names)) == len(names)
        assert make_encoder(bpe_path).name == names[3]

    def test_vocabulary_holds_every_id(self, encoder):
        assert encoder.vocab_size == encoder.tokenizer.vocab_size
        assert encoder.encode(chat(*TURNS)).tokens.max() < encoder.vocab_size


class TestTemplateFile:
    def test_missing_file_names_the_nearest(self, tmp_path):
        (tmp_path / "chat.jinja").write_text("")
        with pytest.raises(
            FileNotFoundError, match=r"chat_template must be.*did you mean.*chat\.j"
        ):
            make_encoder("byte", chat_template=str(tmp_path / "chta.jinja"))

    def test_invalid_template_is_refused_at_once(self, tmp_path):
        (tmp_path / "t.jinja").write_text("\n{% if %}")
        with pytest.raises(ValueError, match="chat template: line 2 must be valid Jinja"):
            make_encoder("byte", chat_template=str(tmp_path / "t.jinja"))


def test_names_of_the_byte_tokenizer_are_those_of_its_ids():
    assert ByteTokenizer.chat.special_tokens == {"<|im_start|>": 256, "<|im_end|>": 257}
