"""The trained tokens of a document, and how the text before them is tokenized."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goaly.models.tiny_model import CHARACTERS, write_tiny_tokenizer
from goaly.prompts.prompt import Message
from goaly.prompts.supervised import Document, chat_document, plain_document
from goaly.prompts.tokenizer import ChatTokenizer

texts = st.text(alphabet=CHARACTERS, max_size=12)
exchanges = st.lists(st.tuples(texts, texts), min_size=1, max_size=4)


def trained_text(tokenizer: ChatTokenizer, document: Document) -> str:
    """What of a document is trained, as text."""
    tokens = [token for token, trained in zip(document.tokens, document.trained, strict=True) if trained]
    return tokenizer.decode(tokens, skip_special_tokens=False)


def chat(*contents: str) -> list[Message]:
    """User and assistant in turn."""
    return [Message(role=("user", "assistant")[i % 2], content=content) for i, content in enumerate(contents)]


@given(exchanges=exchanges)
def test_a_chat_document_is_the_rendered_chat_with_its_answers_trained(
    tokenizer: ChatTokenizer, exchanges: list[tuple[str, str]]
) -> None:
    messages = chat(*(text for exchange in exchanges for text in exchange))
    document = chat_document(tokenizer, messages, "here")
    assert list(document.tokens) == tokenizer.render(messages, add_generation_prompt=False)
    assert trained_text(tokenizer, document) == "".join(f"{answer}<|end|>" for _, answer in exchanges)


@given(question=texts, answer=texts)
def test_what_precedes_an_answer_is_what_the_policy_would_be_asked(
    tokenizer: ChatTokenizer, question: str, answer: str
) -> None:
    document = chat_document(tokenizer, chat(question, answer), "here")
    asked = tokenizer.render(chat(question))
    assert list(document.tokens[: len(asked)]) == asked
    assert document.trained.index(True) == len(asked)


def test_what_the_template_writes_after_the_stop_token_is_not_trained(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    tokenizer = ChatTokenizer(tmp_path)
    document = chat_document(tokenizer, chat("1", "2", "3", "4"), "here")
    assert trained_text(tokenizer, document) == "2<|end|>4<|end|>"
    assert document.tokens == tuple(tokenizer.render(chat("1", "2", "3", "4"), add_generation_prompt=False))


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content if loop.last else m.content[:1] }}{% endfor %}"
    )
    with pytest.raises(
        ValueError, match="here: with message 3 the chat template renders the messages before it differently"
    ):
        chat_document(ChatTokenizer(tmp_path), chat("1", "2", "33", "4"), "here")


def test_a_chat_without_answer_is_refused(tokenizer: ChatTokenizer) -> None:
    with pytest.raises(ValueError, match="no assistant message"):
        chat_document(tokenizer, chat("1+2="), "here")


def test_a_plain_document_trains_the_completion_and_a_stop_token(tokenizer: ChatTokenizer) -> None:
    document = plain_document(tokenizer, "1+2=", "3", "here")
    assert tokenizer.decode(document.tokens, skip_special_tokens=False) == "1+2=3<|end|>"
    assert trained_text(tokenizer, document) == "3<|end|>"


def test_the_first_token_is_never_trained(tokenizer: ChatTokenizer) -> None:
    assert plain_document(tokenizer, "", "12", "here").trained == (False, True, True)


def test_a_template_is_only_needed_for_chats(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert plain_document(ChatTokenizer(tmp_path), "1", "2", "here").tokens
