"""A recorded chat goes on by what the template adds; what is recorded is never written again (prompts-2)."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from goaly.base.errors import EpisodeError
from goaly.models.tiny_model import CHARACTERS, END, PAD, SPECIAL, write_tiny_tokenizer
from goaly.prompts.prompt import Message
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer

STOP = SPECIAL.index(END)
LINES = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
ANSWER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
FORGETS = LINES.replace("m.content", "(m.content if loop.last else m.content.split(')')[-1])")
STRIPS = LINES.replace("m.content", "m.content | trim")
texts = st.text(alphabet=CHARACTERS, max_size=8)


def with_template(folder: Path, template: str) -> ChatTokenizer:
    write_tiny_tokenizer(folder)
    (folder / "own.jinja").write_text("{{ '' }}" + template + ANSWER)
    return ChatTokenizer(folder, ChatSettings(template_file=str(folder / "own.jinja")))


@pytest.fixture(scope="module")
def lines(tmp_path_factory) -> ChatTokenizer:
    """A template that writes a line break after every end token, which the policy never does."""
    return with_template(tmp_path_factory.mktemp("lines"), LINES)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str) -> Message:
    return Message(role="assistant", content=text)


@given(
    question=texts,
    answers=st.lists(st.tuples(texts, st.booleans(), texts), min_size=1, max_size=3),
    as_recorded=st.booleans(),
)
def test_recorded_turns_and_what_is_added_are_the_tokens_of_the_whole_chat(lines, question, answers, as_recorded):
    chat = [user(question)]
    recorded = lines.render(chat)
    for answer, stopped, following in answers:
        recorded += lines.encode(answer) + [STOP] * stopped  # an answer at its token limit has no end token
        chat += [assistant(answer), user(following)]
        recorded += lines.render_more(chat, recorded, as_recorded=as_recorded)
        assert recorded == lines.render(chat)


def test_messages_of_other_roles_and_several_at_once_are_added(lines):
    chat = [user("1"), assistant("2")]
    recorded = lines.render(chat[:1]) + lines.encode("2") + [STOP]
    chat += [Message(role="system", content="3"), user("4")]
    assert (
        lines.decode(lines.render_more(chat, recorded), False)
        == "\n<|system|>3<|end|>\n<|user|>4<|end|>\n<|assistant|>"
    )


def test_a_template_that_leaves_out_what_the_policy_thought_is_refused_and_may_be_overruled(tmp_path):
    forgets = with_template(tmp_path, FORGETS)
    chat = [user("1"), assistant("(2)3"), user("4")]
    recorded = forgets.render(chat[:1]) + forgets.encode("(2)3") + [STOP]
    with pytest.raises(EpisodeError) as error:
        forgets.render_more(chat, recorded)
    assert "'(2)3<|end|>' is recorded at character 30, and the template renders '3<|end|>\\n<|user|>4" in str(
        error.value
    )
    assert "as_recorded=True" in str(error.value)
    added = forgets.render_more(chat, recorded, as_recorded=True)
    assert forgets.decode(added, False) == "\n<|user|>4<|end|>\n<|assistant|>"


@pytest.mark.parametrize(
    ("ending", "added"),
    [
        ([STOP], "\n<|user|>4<|end|>\n<|assistant|>"),
        ([], "<|end|>\n<|user|>4<|end|>\n<|assistant|>"),  # cut off
        ([SPECIAL.index(PAD)], "<|end|>\n<|user|>4<|end|>\n<|assistant|>"),  # another stop token than the template's
    ],
)
def test_as_recorded_goes_on_after_the_answer_however_that_ended(tmp_path, ending, added):
    strips = with_template(tmp_path, STRIPS)
    chat = [user("1"), assistant(" 2"), user("4")]
    recorded = strips.render(chat[:1]) + strips.encode(" 2") + ending
    assert strips.decode(strips.render_more(chat, recorded, as_recorded=True), False) == added


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", [user("1"), assistant(" 2"), user("4")]),
        (STRIPS, [user(" 1"), user("2")]),
        (LINES.replace("<|end|>", "{{ '<|end|>' if m.role == 'user' }}"), [user("1"), assistant("2"), user("4")]),
    ],
    ids=["no end tokens", "no answer", "no end token after answers"],
)
def test_as_recorded_needs_an_answer_that_ends_with_a_stop_token(tmp_path, template, chat):
    with pytest.raises(EpisodeError, match=r"must end with a stop token .*<\|end\|>.*context\.encode"):
        with_template(tmp_path, template).render_more(chat, [7, 8, 9], as_recorded=True)
