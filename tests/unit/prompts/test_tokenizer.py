"""Chat rendering over the tokenizer that goaly makes."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.models.tiny_model import CHARACTERS, SPECIAL, write_tiny_tokenizer
from goaly.prompts.prompt import Message
from goaly.prompts.tokenizer import ChatTokenizer

texts = st.text(alphabet=CHARACTERS, max_size=40)
chats = st.lists(
    st.builds(Message, role=st.sampled_from(["system", "user", "assistant"]), content=texts), min_size=1, max_size=4
)


@given(text=texts)
def test_every_text_of_the_alphabet_survives_encoding_and_decoding(tokenizer: ChatTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert len(tokens) == len(text)


def test_the_tiny_vocabulary_has_32_tokens_and_stops_at_the_end_token(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.vocab_size == len(SPECIAL) + len(CHARACTERS) == 32
    assert tokenizer.decode(tokenizer.stop_token_ids, skip_special_tokens=False) == "<|end|>"
    assert tokenizer.pad_token not in tokenizer.stop_token_ids


def test_special_tokens_are_left_out_of_decoded_answers(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("12|3"), *tokenizer.stop_token_ids]) == "12|3"


def test_rendering_gives_the_tokens_that_transformers_gives(tiny_folder: Path, tokenizer: ChatTokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tiny_folder)

    @settings(max_examples=30)
    @given(messages=chats, add_generation_prompt=st.booleans())
    def same(messages: list[Message], add_generation_prompt: bool) -> None:
        plain = [{"role": message.role, "content": message.content} for message in messages]
        expected = theirs.apply_chat_template(plain, add_generation_prompt=add_generation_prompt, tokenize=False)
        assert tokenizer.render_text(messages, add_generation_prompt) == expected
        expected_ids = theirs(expected, add_special_tokens=False)["input_ids"]
        assert tokenizer.render(messages, add_generation_prompt) == expected_ids

    same()


def test_a_template_file_wins_over_the_config(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}\n  {{ m.content }}{% endfor %}")
    assert ChatTokenizer(tmp_path).render_text([Message(role="user", content="1")]).strip() == "1"


def test_stop_tokens_come_from_the_generation_config_and_the_eos_token(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    assert ChatTokenizer(tmp_path).stop_token_ids == (3, 1)


def test_a_folder_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        ChatTokenizer(tmp_path)


def test_a_folder_without_chat_template_is_refused_when_a_chat_is_rendered(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="no chat template"):
        ChatTokenizer(tmp_path).render([Message(role="user", content="1")])
