"""Messages of clients, as sessions compare them and templates render them."""

import pytest
from agent_sessions import TOOLS, assistant, user

from goaly.agents.conversation import Conversation, canonical


def last_digest(*messages, tools=()):
    return Conversation.of(messages, tools).digests[-1]


@pytest.mark.parametrize(
    ("sent", "same"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, user("a\nb")),
        ({"role": "user", "content": []}, user("")),
        ({"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": []}, assistant("")),
        ({"role": "assistant", "content": "a", "reasoning": "b"}, assistant("a", "b")),
        ({"role": "user", "content": "a", "name": None}, user("a")),
    ],
)
def test_messages_that_mean_the_same_are_the_same(sent, same):
    assert canonical(sent) == canonical(same)


def test_content_that_is_not_only_text_stays_a_list():
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "b"}}]
    assert canonical({"role": "user", "content": parts}).content == parts


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [('{"x": 1}', {"x": 1}), ({"x": 1}, {"x": 1}), ("{x", {}), ("[1]", {}), ("", {}), (None, {})],
)
def test_templates_get_the_arguments_of_a_call_as_an_object(arguments, rendered):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    (read,) = canonical({"role": "assistant", "tool_calls": [call]}).tool_calls
    assert read == {"id": "1", "type": "function", "function": {"name": "add", "arguments": rendered}}


def test_equal_conversations_have_equal_digests_whatever_the_order_of_keys_and_the_reasoning():  # CV-1
    ours = assistant("a", "Hm.", {"x": 1, "y": 2})
    assert last_digest(user("q"), ours) == last_digest(user("q"), assistant("a", None, {"y": 2, "x": 1}))
    others = [
        assistant("b", "Hm.", {"x": 1, "y": 2}),
        assistant("a", "Hm.", {"x": 1}),
        assistant("a", "Hm."),
        user("a"),
    ]
    assert last_digest(user("q"), ours) not in [last_digest(user("q"), other) for other in others]
    assert last_digest(ours) != last_digest(user("q"), ours)
    assert last_digest(user("q"), tools=TOOLS) != last_digest(user("q"), tools=TOOLS[::-1])


def test_a_users_reasoning_is_compared():
    assert last_digest({**user("q"), "reasoning_content": "a"}) != last_digest({**user("q"), "reasoning_content": "b"})


@pytest.mark.parametrize(
    "message",
    [{"content": "no role"}, {"role": "assistant", "tool_calls": [{"id": "x", "type": "custom", "custom": {}}]}],
)
def test_a_message_without_a_role_and_a_call_without_a_function_are_refused(message):
    with pytest.raises(ValueError, match="must have a"):
        canonical(message)
