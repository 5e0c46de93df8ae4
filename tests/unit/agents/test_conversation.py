"""Messages of clients, as sessions compare them and templates render them."""

import json
import shutil
import subprocess

import pytest
from agent_sessions import TOOLS, assistant, tool, user

from goaly.agents.conversation import Conversation, canonical


def last_digest(*messages, tools=()):
    return Conversation.of(messages, tools).digests[-1]


@pytest.mark.parametrize(
    ("sent", "same"),
    [
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            user("a"),
        ),
        ({"role": "user", "content": []}, user("")),
        ({"role": "assistant", "content": None, "refusal": None, "annotations": [], "tool_calls": []}, assistant("")),
        ({"role": "assistant", "content": "a", "reasoning": "b"}, assistant("a", "b")),
        ({"role": "user", "content": "a", "name": None}, user("a")),
    ],
)
def test_messages_that_mean_the_same_are_the_same(sent, same):
    assert canonical(sent) == canonical(same)


def test_parts_stay_apart_and_are_compared_as_their_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
    assert canonical({"role": "user", "content": parts}).content == parts
    assert last_digest({"role": "user", "content": parts}) == last_digest(user("a\nb"))


@pytest.mark.parametrize(
    "content", [[{"type": "image_url", "image_url": {"url": "b"}}], [{"type": "text"}], ["a"], {"type": "text"}, 3]
)
def test_a_content_that_is_not_only_text_is_refused(content):
    with pytest.raises(ValueError, match="must be a text or a list of parts with type text"):
        last_digest({"role": "user", "content": content})


@pytest.mark.parametrize(
    ("arguments", "rendered"),
    [('{"x": 1}', {"x": 1}), ({"x": 1}, {"x": 1}), ("{x", {}), ("[1]", {}), ("", {}), (None, {})],
)
def test_templates_get_the_arguments_of_a_call_as_an_object(arguments, rendered):
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    (read,) = canonical({"role": "assistant", "tool_calls": [call]}).tool_calls
    assert read == {"id": "1", "type": "function", "function": {"name": "add", "arguments": rendered}}


def test_equal_conversations_have_equal_digests_whatever_the_order_of_keys_and_the_reasoning():
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


NUMBERS = [
    *("2.0", "2", "1e3", "-0.0", "0", "-0", "1E-7", "0.1", "0.10000000000000001", "0.10000000000000002", "4.350"),
    *(
        "9007199254740992",
        "9007199254740993",
        "9007199254740994",
        "-9007199254740993",
        "123456789012345678901234567890",
    ),
    *("1e21", "1e-400", "5e-324", "1.7976931348623157e308", '[1.0, {"a": 2.50}]', "true", "1", "null"),
    *('"2.0"', '{"b": 1.0, "2": 1, "a": 1, "1": 1}'),
]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_arguments_that_a_client_in_javascript_has_read_and_written_are_the_same_and_others_are_not():
    texts = [f'{{"x": {number}}}' for number in NUMBERS]
    code = "console.log(JSON.stringify(JSON.parse(process.argv[1]).map(text => JSON.stringify(JSON.parse(text)))))"
    ran = subprocess.run(["node", "-e", code, json.dumps(texts)], capture_output=True, check=True)
    written = json.loads(ran.stdout)

    def digest(text):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": text}}
        return last_digest(user("q"), {"role": "assistant", "tool_calls": [call]})

    assert [digest(text) for text in written] == [digest(text) for text in texts]
    assert len({digest(text) for text in texts}) == len(set(written))


def with_ids(messages, *ids):
    """The messages with these ids of calls, each in place of `call-N`."""
    sent = {f"call-{number}": own for number, own in enumerate(ids)}
    return json.loads(
        json.dumps(messages),
        object_hook=lambda read: {
            key: sent.get(value, value) if key in ("id", "tool_call_id") else value for key, value in read.items()
        },
    )


CHAT = [user("q"), assistant("", None, {"x": 1}, {"x": 1}), tool("2", "call-0"), tool("3", "call-1"), user("r")]


@pytest.mark.parametrize("ids", [("a", "b"), ("call-1", "call-0"), (None, "b"), (7, ["b"])])
def test_calls_with_other_ids_are_the_same_if_their_results_name_them(ids):
    recorded, sent = Conversation.of(CHAT[:2]), Conversation.of(with_ids(CHAT, *ids))
    named = [*ids[:1], "call-1"] if None in ids else ["call-0", "call-1"]
    assert sent.digests[1:2] == recorded.digests[1:]
    extended = recorded.extended(sent)
    assert [message.tool_call_id for message in extended.messages[2:4]] == named
    assert extended.digests == sent.digests == Conversation.of([one.as_dict() for one in extended.messages]).digests


def test_a_client_may_begin_its_ids_anew_in_each_turn():
    first, second = assistant("", None, {"x": 1}), assistant("", None, {"x": 2})
    second["tool_calls"][0]["id"] = "call-1"
    chat = [user("q"), first, tool("1", "call-0"), second, tool("2", "call-1")]
    sent = Conversation.of(with_ids(chat, "mine", "mine"))
    assert sent.digests == Conversation.of(chat).digests
    extended = Conversation.of(chat[:2]).extended(sent)
    assert [message.tool_call_id for message in extended.messages] == [None, None, "call-0", None, "mine"]


def test_results_of_exchanged_calls_are_others():
    exchanged = [*CHAT[:2], {**CHAT[2], "tool_call_id": "call-1"}, {**CHAT[3], "tool_call_id": "call-0"}]
    assert last_digest(*exchanged) != last_digest(*CHAT)
    assert last_digest(*CHAT[:2], {**CHAT[2], "tool_call_id": "of no call"}) != last_digest(*CHAT[:3])


def test_a_users_reasoning_is_compared():
    assert last_digest({**user("q"), "reasoning_content": "a"}) != last_digest({**user("q"), "reasoning_content": "b"})


@pytest.mark.parametrize(
    "message",
    [{"content": "no role"}, {"role": "assistant", "tool_calls": [{"id": "x", "type": "custom", "custom": {}}]}],
)
def test_a_message_without_a_role_and_a_call_without_a_function_are_refused(message):
    with pytest.raises(ValueError, match="must have a"):
        canonical(message)
