"""An episode chats with the policy: messages go in, parsed messages come out, and the session has what was sampled."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from agent_sessions import MALFORMED, PENALTY, TOOLS, Agent
from chat_templates import FAMILIES, chat_of, hermes
from http_sessions import policy_of
from tokenizers import Tokenizer

from goaly.agents.answer_parser import AnswerParser, starts_of_calls
from goaly.agents.chat import Chat
from goaly.agents.session import Session, SessionExhausted
from goaly.agents.settings import SessionSettings
from goaly.base.errors import EpisodeError
from goaly.generate.policy import ContextFull
from goaly.generate.request import Finish, Sample, Sampling
from goaly.prompts.prompt import Message
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer

TOKEN = re.compile("<[|\uff5c][^>]*[|\uff5c]>")
CALL = {"id": "", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": 2, "b": 3})}}


class Sampler:
    """Answers with these texts and a stop token, in order."""

    def __init__(self, chat: ChatTokenizer, *texts: str):
        self._chat = chat
        self._texts = iter(texts)
        self.prompts: list[str] = []
        self.limits: list[int | None] = []

    async def generate(self, name: str, tokens: Sequence[int], sampling: Sampling, *_: Any) -> Sample:
        self.limits.append(sampling.max_tokens)
        self.prompts.append(self._chat.decode(tokens, skip_special_tokens=False))
        written = torch.tensor([*self._chat.encode(next(self._texts)), self._chat.stop_token_ids[0]])
        versions = torch.full(written.shape, 3, dtype=torch.int32)
        return Sample(tokens=written, logprobs=-written.float() - 1, versions=versions, finish=Finish.STOP)


def chat_with(
    chat: ChatTokenizer,
    *answers: str,
    limits: SessionSettings | None = None,
    max_context: int = 4096,
    **parsers: Any,
) -> Any:
    """A chat with a policy that gives these answers, and its sampler."""
    sampler = Sampler(chat, *answers)
    policy = policy_of(chat, sampler, name="e", session="s", sampling=Sampling(max_tokens=100), max_context=max_context)
    session = Session(chat, prompt_id="q1", limits=limits)
    parser = AnswerParser(chat, ChatSettings(**parsers))
    parser.load()
    return Chat(policy, session, parser, TOOLS), sampler


def user(text: str) -> Message:
    return Message(role="user", content=text)


@pytest.mark.parametrize("what", MALFORMED)
async def test_a_malformed_call_is_returned_and_counted_and_costs_reward(
    chats: dict[str, ChatTokenizer], what: str
) -> None:
    whole = hermes({"content": "", "tool_calls": [CALL]})
    chat, _ = chat_with(chats["hermes"], MALFORMED[what], whole, tool_parser="hermes", limits=PENALTY)
    said = [user("2+3?")]
    answer = await chat.say(said)
    assert answer.content or answer.tool_calls
    await chat.say([*said, answer, user("again")])
    assert chat.session.malformed_calls == 1
    assert sum(one.reward for one in chat.finish(1.0)) == pytest.approx(0.75 if len(chat.finish(1.0)) == 1 else 1.75)


@pytest.mark.parametrize(
    ("parser", "text", "malformed"),
    [
        ("pythonic", "[add(a=2, b=3)]", 0),
        ("pythonic", "[add(a=2, b=", 1),
        ("pythonic", "[2, 3] are the numbers of add(a, b)", 0),
        ("llama4_pythonic", "[add(a=2, b=", 1),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>", 0),
        ("qwen3_coder", "<tool_call>\n{broken}\n</tool_call>", 1),
        ("qwen3_coder", "no call", 0),
    ],
)
async def test_parsers_that_name_no_start_of_a_call_count_malformed_ones_too(
    chats: dict[str, ChatTokenizer], parser: str, text: str, malformed: int
) -> None:
    chat, _ = chat_with(chats["hermes"], text, tool_parser=parser)
    await chat.say([user("2+3?")])
    assert chat.session.malformed_calls == malformed


IN_THE_WAY_OF = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>%s"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek_v31": "<|tool▁calls▁begin|><|tool▁call▁begin|>add<|tool▁sep|>%s"
    "<|tool▁call▁end|><|tool▁calls▁end|>".replace("|", "\uff5c"),
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>",
    "internlm": '<|action_start|><|plugin|>{"name": "add", "parameters": %s}<|action_end|>',
}
"""A call with these arguments, as a parser reads it; of `qwen3_coder` with these as its argument `a`."""
TAKES_A_LIST = {"type": "object", "properties": {"a": {"type": "array"}}}
HOSTILE = {
    "deep": '{"a": ' + "[" * 3000 + "]" * 3000 + "}",
    "deep and cut off": '{"a": ' + "[" * 3000,
    "infinite": '{"a": 1e999}',
    "no number": '{"a": NaN}',
    "a huge number": '{"a": 1' + "0" * 5000 + "}",
    "a part of a character": '{"a": "\\ud800"}',
    "deep, but not too deep for a parser": '{"a": ' + "[" * 100 + "]" * 100 + "}",
}
READ_AS_TEXT = {"kimi_k2": ["infinite", "no number"], "qwen3_coder": ["infinite", "no number", "a huge number"]}
"""What these parsers turn into a text, which is an argument as any."""


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    """A tokenizer that has the tokens of all these calls."""
    folder, hermes_like = tmp_path_factory.mktemp("caller"), FAMILIES["hermes"]
    chat_of(hermes_like.template, hermes_like.stops, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(sorted({token for way in IN_THE_WAY_OF.values() for token in TOKEN.findall(way)}))
    tokenizer.save(str(folder / "tokenizer.json"))
    return ChatTokenizer(folder, ChatSettings(template_file=str(folder / "own.jinja")))


@pytest.mark.parametrize("parser", IN_THE_WAY_OF)
@pytest.mark.parametrize("what", HOSTILE)
async def test_arguments_that_no_reader_can_take_are_malformed_and_the_chat_goes_on(
    caller: ChatTokenizer, parser: str, what: str
) -> None:
    arguments = HOSTILE[what][len('{"a": ') : -1] if parser == "qwen3_coder" else HOSTILE[what]
    answers, facts = (
        (IN_THE_WAY_OF[parser] % arguments, "sorry"),
        {"max_context": 1 << 14, "limits": PENALTY},
    )
    chat, _ = chat_with(caller, *answers, tool_parser=parser, **facts)
    said, tools = [user("2+3?")], [{"type": "function", "function": {"name": "add", "parameters": TAKES_A_LIST}}]
    answer = await chat.say(said, tools)
    json.dumps(answer.as_dict(), ensure_ascii=False).encode()  # as clients get it
    results = [
        Message(role="tool", content="malformed", tool_call_id=call["id"]) for call in answer.tool_calls or ()
    ] or [user("malformed")]
    assert (await chat.say([*said, answer, *results], tools)).content == "sorry"
    malformed = 0 if what in READ_AS_TEXT.get(parser, ()) else 1
    assert chat.session.malformed_calls == malformed
    assert sum(one.reward for one in chat.finish(1.0)) == pytest.approx(len(chat.finish(1.0)) - 0.25 * malformed)


def test_the_penalty_of_a_malformed_call_is_there_again_after_a_replay(agent: Callable[..., Agent]) -> None:
    one = agent("hermes", limits=PENALTY)
    place = one.session.extend([user("2+3?").as_dict()])
    completion = one.completion(place.prompt, [5, 6])
    one.session.record(place, completion, {"role": "assistant", "content": "nothing"}, malformed=2)
    assert len(one.log) == 1
    rewards = [[each.reward for each in session.trajectories(1.0)] for session in (one.session, one.replayed())]
    assert rewards == [[0.5], [0.5]]


class EveryToken(dict[str, int]):
    """A tokenizer, and its vocabulary, in which every token is."""

    def get_vocab(self) -> dict[str, int]:
        return self

    def get(self, *_: Any) -> int:
        return 1


@pytest.mark.parametrize(
    ("parser", "starts"),
    [
        ("hermes", ["<tool_call>"]),
        ("jamba", ["<tool_calls>"]),
        ("llama3_json", ["<|python_tag|>"]),
        ("pythonic", []),
        ("qwen3_coder", ["<tool_call>"]),
        ("granite", ["<tool_call>", "<|tool_call|>"]),
        ("kimi_k2", ["<|tool_call_begin|>", "<|tool_calls_section_begin|>"]),
    ],
)
def test_the_texts_that_begin_calls_are_those_of_vllms_parser(parser: str, starts: list[str]) -> None:
    from vllm.tool_parsers import ToolParserManager

    assert starts_of_calls(ToolParserManager.get_tool_parser(parser)(EveryToken(any=1), None)) == starts


async def test_tools_are_called_and_answered_in_one_trajectory(chats: dict[str, ChatTokenizer]) -> None:
    call = hermes({"content": "let me add", "tool_calls": [CALL]})
    chat, sampler = chat_with(chats["hermes"], call, "it is 5", tool_parser="hermes")
    said = [user("2+3?")]
    answer = await chat.say(said)
    assert answer.content.strip() == "let me add"
    ((found),) = answer.tool_calls
    assert (found["function"]["name"], json.loads(found["function"]["arguments"])) == ("add", {"a": 2, "b": 3})
    said += [answer, Message(role="tool", content="5", tool_call_id=found["id"])]
    last = await chat.say(said)
    assert (last.content, last.tool_calls) == ("it is 5", None)
    assert sampler.prompts[1].startswith(sampler.prompts[0] + call)
    chat.credited(answer, 0.25)
    (trajectory,) = chat.finish(1.0)
    assert trajectory.reward == 1.25
    assert [turn.author for turn in trajectory.turns].count("policy") == 2
    assert trajectory.tokens["sampler_versions"][trajectory.tokens["trained"]].unique().tolist() == [3]


async def test_a_call_that_is_malformed_stays_text(chats: dict[str, ChatTokenizer]) -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {\n</tool_call>'
    chat, _ = chat_with(chats["hermes"], broken, tool_parser="hermes")
    answer = await chat.say([user("2+3?")])
    assert answer.tool_calls is None
    assert answer.content == broken


async def test_reasoning_is_apart_from_the_answer(chats: dict[str, ChatTokenizer]) -> None:
    chat, _ = chat_with(chats["qwen3"], "<think>\nhard\n</think>\n\nfive", reasoning_parser="qwen3")
    answer = await chat.say([user("2+3?")])
    assert (answer.reasoning_content.strip(), answer.content.strip()) == ("hard", "five")


@pytest.mark.parametrize(
    ("parser", "args", "reasoning", "content"),
    [
        ("qwen3", {}, "five", None),
        ("qwen3", {"enable_thinking": False}, None, "five"),
        ("deepseek_v3", {}, None, "five"),
        ("deepseek_v3", {"thinking": True}, "five", None),
    ],
)
async def test_the_arguments_of_the_template_say_whether_an_answer_has_reasoning(
    chats: dict[str, ChatTokenizer], parser: str, args: dict[str, Any], reasoning: str | None, content: str | None
) -> None:
    chat, _ = chat_with(chats["qwen3"], "five", reasoning_parser=parser, template_args=args)
    answer = await chat.say([user("2+3?")])
    assert (answer.reasoning_content, answer.content) == (reasoning, content)


async def test_without_parsers_an_answer_is_its_text_and_branches_are_trajectories(
    chats: dict[str, ChatTokenizer],
) -> None:
    chat, _ = chat_with(chats["chatml"], "one", "two", "three")
    first = await chat.say([user("a")])
    assert first == Message(role="assistant", content="one")
    await chat.say([user("a"), first, user("b")])
    await chat.say([user("another")])
    assert [trajectory.reward for trajectory in chat.finish(0.5)] == [0.5, 0.5]


async def test_an_answer_of_the_sampled_tools_names_them_in_the_prompt(chats: dict[str, ChatTokenizer]) -> None:
    chat, sampler = chat_with(chats["hermes"], "x", "y")
    await chat.say([user("a")])
    await chat.say([user("a")], tools=[])
    assert [all(name in prompt for name in ("add", "search")) for prompt in sampler.prompts] == [True, False]


async def test_an_answer_ends_at_the_limit_of_its_sessions_tokens(chats: dict[str, ChatTokenizer]) -> None:
    chat, sampler = chat_with(chats["chatml"], "abc", "abcdefghijkl", limits=SessionSettings(tokens=12))
    said = [user("a")]
    first = await chat.say(said)
    await chat.say([*said, first, user("b")], max_tokens=50)
    assert sampler.limits == [12, 12 - len(chat.session.turns[0].tokens)]
    with pytest.raises(SessionExhausted, match="sampled tokens, the limit is 12"):
        await chat.say([user("c")])


async def test_messages_that_cannot_fit_are_refused_before_they_are_tokenized_and_mark_the_session(
    chats: dict[str, ChatTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatTokenizer, "fewest_tokens", lambda _, text: len(text) // 16)
    chat, _ = chat_with(chats["hermes"], "one")
    said = [user("a")]
    said.append(await chat.say(said))
    with pytest.raises(ContextFull, match=r"^1[0-9]{4} tokens leave no room"):  # the fewest; it has 200,000
        await chat.say([*said, user("a" * 200_000)])
    assert chat.session.exhausted


@pytest.mark.parametrize("family", ["chatml", "hermes"])
async def test_a_message_with_half_a_character_is_refused_by_name_and_the_chat_goes_on(
    chats: dict[str, ChatTokenizer], family: str
) -> None:
    chat, _ = chat_with(chats[family], "one", "two")
    said = [user("a")]
    said.append(await chat.say(said))
    with pytest.raises(ValueError, match=r"the text has a lone surrogate, '\\ud83d' at character \d+"):
        await chat.say([*said, user("b \ud83d")])
    assert (await chat.say([*said, user("b")])).content == "two"
    assert len(chat.finish(1.0)) == 1


async def test_limits_and_mistakes_are_told(chats: dict[str, ChatTokenizer]) -> None:
    chat, _ = chat_with(chats["chatml"], "one", limits=SessionSettings(turns=1))
    with pytest.raises(EpisodeError, match="must get a message that `say` returned"):
        chat.credited(Message(role="assistant", content="one"), 1.0)
    await chat.say([user("a")])
    with pytest.raises(SessionExhausted):
        await chat.say([user("b")])


def test_parsers_that_vllm_lacks_are_refused() -> None:
    first, second = ChatSettings(tool_parser="hermees", reasoning_parser="none").problems("chat.")
    assert first.startswith("chat.tool_parser=hermees: vLLM has no such parser, must be one of ")
    assert " hermes," in first
    assert second.startswith("chat.reasoning_parser=none: vLLM has no such parser")
    assert ChatSettings(tool_parser="hermes", reasoning_parser="qwen3").problems("chat.") == []


async def test_notes_of_a_script_go_with_the_first_trajectory_and_into_the_records(chats: dict[str, ChatTokenizer]):
    chat, _ = chat_with(chats["hermes"], "one", "two", "other")
    chat.note({"kind": "begin"})
    said = [user("2+3?")]
    answer = await chat.say(said)
    chat.note({"command": "ls", "exit_code": 0})
    await chat.say([*said, answer, user("again")])
    await chat.say([user("another chat")])
    first, second = chat.finish(1.0)
    assert list(first.notes) == [{"kind": "begin", "after": 0}, {"command": "ls", "exit_code": 0, "after": 1}]
    assert second.notes == ()
    again = Session(chats["hermes"], prompt_id="q1").replay(chat.session.records())
    assert again.notes == chat.session.notes
