"""Which templates only append to an answer, and the tokens that they append."""

import pytest
from agent_sessions import Agent, assistant, system, tool, user
from chat_templates import CHATML, FAMILIES, chat_of

from goaly.agents.bridge import MARK


@pytest.mark.parametrize(
    ("ending", "begins"),
    [("<|im_end|>", "\n"), ("<|endoftext|>", "\n"), ("", "<|im_end|>\n")],
    ids=["its stop token", "another stop token", "no stop token"],
)
def test_the_stop_token_is_sampled_or_added_but_not_both(agent, ending, begins):
    a = agent()
    turn = a.say([user("a")], assistant("b"), tokens=a.chat.encode("b" + ending))
    added = a.session.extend([user("a"), assistant("b"), user("c")])
    assert added.parent is turn
    assert a.text(added.context).startswith(begins + "<|im_start|>user")


def test_what_the_template_leaves_out_of_an_answer_is_not_continued(agent):  # agents-5
    a = agent("llama3")
    spoken = assistant("I add.", None, {"x": 1})  # Llama 3 renders the call only
    a.say([user("a")], spoken)
    assert a.session.extend([user("a"), spoken, tool("2")]).parent is None
    for blank in ("", "\n"):
        call = assistant(blank, None, {"x": 1})
        turn = a.say([user("b")], call)
        assert a.session.extend([user("b"), call, tool("2")]).parent is turn


MERGES = CHATML.replace(
    "'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'",
    "('' if loop.previtem and loop.previtem.role == m.role else '<|im_start|>' + m.role + '\n') + m.content"
    " + ('' if loop.nextitem and loop.nextitem.role == m.role else '<|im_end|>\n')",
)
LATE = CHATML.replace("'<|im_end|>\n'", "('' if m.role == 'assistant' else '<|im_end|>\n')")
HOISTS = CHATML.replace("in messages %}", "in messages | sort(attribute='role', reverse=true) %}", 1)
COUNTS = CHATML.replace(
    "m.content", "m.content + '|' + (loop.previtem.content | length | string if loop.previtem else '')"
)
GLUED = "{% for m in messages %}{{ m.role + ':' + m.content + 'abc' }}{% endfor %}"
FORGETS = CHATML.replace("m.content", "m.content[-4:]")


@pytest.mark.parametrize(
    ("template", "stops", "follow"),
    [
        pytest.param(MERGES, ["<|im_end|>"], [assistant("more")], id="merged answers"),
        pytest.param(LATE, ["<|im_end|>"], [user("c")], id="no stop token"),
        pytest.param(LATE, ["<|im_end|>"], [tool("c")], id="no stop token before a result"),
        pytest.param(HOISTS, ["<|im_end|>"], [system("c")], id="a message before earlier ones"),
        pytest.param(FORGETS, ["<|im_end|>"], [user("c")], id="a shorter answer"),
        pytest.param(COUNTS, ["<|im_end|>"], [user("c")], id="new messages that depend on the answer"),
        pytest.param(CHATML, ["<|eot_id|>"], [user("c")], id="another stop token"),
        pytest.param(CHATML, [], [user("c")], id="a model without stop tokens"),
        pytest.param(GLUED, ["ab"], [user("c")], id="a stop token that is encoded with the text after it"),
    ],
)
def test_a_template_that_does_more_than_append_branches(tmp_path, template, stops, follow):  # agents-5
    a = Agent(chat_of(template, stops, tmp_path / "own"), FAMILIES["chatml"])
    chat = [user("a"), assistant("b, at length")]
    a.say(chat[:1], chat[1], tokens=[60])
    branched = a.session.extend([*chat, *follow])
    assert branched.parent is None
    assert a.text(branched.prompt) == a.chat.render_text(branched.request.messages)


def test_an_answer_of_two_parts_with_a_stop_token_each_is_continued_after_the_last(tmp_path):  # agents-5
    parts = CHATML.replace(
        "m.content",
        "(m.reasoning_content + '<|im_end|>\n<|im_start|>say\n' if m.reasoning_content else '') + m.content",
    )
    a = Agent(chat_of(parts, ["<|im_end|>"], tmp_path / "own"), FAMILIES["chatml"])
    turn = a.say([user("a")], assistant("b", "Hm."))
    went_on = a.session.extend([user("a"), assistant("b", "Hm."), user("c")])
    assert went_on.parent is turn
    assert a.text(went_on.context) == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_may_contain_the_marks_that_find_an_answers_end(agent):
    a = agent()
    turn = a.say([user("a")], assistant("b"))
    went_on = a.session.extend([user("a"), assistant("b"), user(f"{MARK}0. {MARK}1. {MARK}{MARK}1.")])
    assert went_on.parent is turn
    assert a.text(went_on.prompt) == a.chat.render_text(went_on.request.messages)


def test_a_template_that_leaves_out_a_blank_answer_branches(tmp_path):  # agents-5
    skips = CHATML.replace("in messages %}", "in messages if m.content %}", 1)
    a = Agent(chat_of(skips, ["<|im_end|>"], tmp_path / "own"), FAMILIES["chatml"])
    a.say([user("a")], assistant(""), tokens=[60])
    assert a.session.extend([user("a"), assistant("")]).parent is None
