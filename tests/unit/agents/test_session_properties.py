"""Sessions under random agents: follow-ups, tool results, retries, edits, compaction, sub-agents, other tools."""

import json
from collections import Counter
from dataclasses import dataclass

import pytest
from agent_sessions import TOOLS, Agent, assistant, system, tool, user
from chat_templates import CHARACTERS, FAMILIES, SPECIAL, Family
from hypothesis import given, settings
from hypothesis import strategies as st

from goaly.agents.conversation import Conversation, canonical
from goaly.agents.session import Session
from goaly.agents.turn import Continuation, RecordedTurn
from goaly.generate.request import Finish
from goaly.trajectory import NO_VERSION

VOCABULARY = len(SPECIAL) + len(CHARACTERS)
words = st.text(alphabet='ab\n"{}<>', min_size=1, max_size=4).map(lambda text: f"a{text}b")
places = st.integers(0, 99)
sampled = st.lists(st.integers(0, VOCABULARY - 1), max_size=4)


@dataclass(frozen=True)
class Step:
    """What an agent does next, with one of the conversations that it knows."""

    kind: str
    conversation: int
    """Counts from the newest."""
    place: int
    text: str
    reasoning: str | None
    calls: int
    silent: bool
    tokens: list[int]
    finish: Finish
    sends_reasoning: bool


steps = st.builds(
    Step,
    kind=st.sampled_from(["ask", "ask", "ask", "ask", "system", "again", "edit", "compact", "new", "tools"]),
    conversation=st.sampled_from([0, 0, 0, 0, 1, 2, 3, 5]),
    place=places,
    text=words,
    reasoning=st.none() | words,
    calls=st.sampled_from([0, 0, 1, 2]),
    silent=st.booleans(),
    tokens=sampled,
    finish=st.sampled_from([Finish.STOP, Finish.LENGTH]),
    sends_reasoning=st.booleans(),
)
runs = st.lists(steps, min_size=1, max_size=8)


def answer_of(step: Step, family: Family):
    """The step's answer, within what the family's template can render."""
    calls = [{"x": step.text, "y": [1, {}]}] * min(step.calls, family.calls)
    says = not calls or (family.content_with_calls and not step.silent)
    return assistant(step.text if says else "", step.reasoning if family.reasons else None, *calls)


def question(messages, step: Step, family: Family):
    """What an agent asks next: the results of the last answer's calls, or a user's message."""
    calls = messages[-1].get("tool_calls") or ()
    if calls:
        return [tool(step.text, call["id"]) for call in calls]
    if family.calls and step.place % 7 == 0:
        return [user(step.text), user("and")]
    return [user(step.text)]


def requests(run: list[Step], family: Family):
    """Yields `(step, messages, tools)`, and receives the messages of the answered conversation: this is the agent."""
    known = [([user("ab")], [])]
    for step in run:
        messages, tools = known[-1 - step.conversation % len(known)]
        place = step.place % len(messages)
        match step.kind:
            case "ask":
                messages = [
                    *messages,
                    *(question(messages, step, family) if messages[-1]["role"] == "assistant" else []),
                ]
            case "system":
                messages = [*messages, *question(messages, step, family), system(step.text)]
            case "edit":
                messages = [*messages[:place], {**messages[place], "content": step.text}, *messages[place + 1 :]]
                if messages[-1]["role"] == "assistant":
                    messages = [*messages, *question(messages, step, family)]
            case "compact":
                messages = [system(step.text), user("a summary")]
            case "new":
                messages = [user(step.text)]
            case "tools":
                tools = TOOLS if not tools else tools[::-1] if step.place % 2 else []
            case "again" if messages[-1]["role"] == "assistant":
                messages = messages[:-1]
        if messages[-1]["role"] == "assistant":
            messages = [*messages, user(step.text)]
        known.append((messages, tools))
        answer = yield step, messages, tools
        known.append(([*messages, answer], tools))


def play(agent: Agent, run: list[Step], *, faithful: bool, all_reasoning: bool = False):
    """Runs an agent; yields `(session's turns before, continuation, turn, messages)` of each request."""
    asking = requests(run, agent.family)
    request = next(asking)
    while True:
        step, messages, tools = request
        answer = answer_of(step, agent.family)
        tokens = agent.written(answer, step.place % len(agent.family.stops)) if faithful else step.tokens
        before = len(agent.session.turns)
        continuation, turn = agent.ask(messages, answer, tools=tools, tokens=tokens, finish=step.finish)
        if step.calls == 1:
            agent.session.credit([turn], step.place)
        yield before, continuation, turn, messages
        sent = answer if step.sends_reasoning or all_reasoning else {**answer, "reasoning_content": None}
        try:
            request = asking.send(json.loads(json.dumps(sent)))
        except StopIteration:
            return


def of_each_family(examples):
    return lambda test: pytest.mark.parametrize("name", FAMILIES)(settings(max_examples=examples)(test))


def sampled_tokens(session: Session) -> Counter:
    """Every sampled token, with its log-probability and version."""
    columns = [(turn.tokens, turn.logprobs, turn.versions) for turn in session.turns]
    return Counter(entry for of_turn in columns for entry in zip(*map(list_of, of_turn), strict=True))


def list_of(column):
    return column.tolist()


def path_tokens(turn: RecordedTurn | None) -> list[int]:
    """The tokens of a turn's path, written another way."""
    return [] if turn is None else [*path_tokens(turn.parent), *turn.context, *turn.tokens.tolist()]


@of_each_family(40)
@given(run=runs)
def test_each_sampled_token_is_trained_once_as_the_engine_gave_it(chats, name, run):  # agents-1, agents-3
    agent = Agent(chats[name], FAMILIES[name])
    credited = Counter()
    for _, continuation, turn, _ in play(agent, run, faithful=False):
        assert list(continuation.prompt) == [*path_tokens(turn.parent), *turn.context]
    trajectories = agent.session.trajectories(0.0)
    trained: Counter = Counter()
    for one in trajectories:
        columns = one.tokens
        mask = columns["trained"]
        keys = ("tokens", "sampler_logprobs", "sampler_versions")
        trained.update(zip(*(columns[key][mask].tolist() for key in keys), strict=True))
        assert not columns["sampler_logprobs"][~mask].any()
        assert (columns["sampler_versions"][~mask] == NO_VERSION).all()
        credited.update(columns["rewards"].tolist())
    assert trained == sampled_tokens(agent.session)
    given_rewards = Counter(
        float(record["reward"]) for record in agent.log if record["kind"] == "credit" and record["reward"]
    )
    assert Counter({reward: count for reward, count in credited.items() if reward}) == given_rewards
    leaves = [turn for turn in agent.session.turns if all(other.parent is not turn for other in agent.session.turns)]
    assert [one.tokens["tokens"].tolist() for one in trajectories] == [path_tokens(leaf) for leaf in leaves]


@of_each_family(20)
@given(run=runs)
def test_a_session_is_rebuilt_from_its_log_after_any_request(chats, name, run):  # agents-4
    agent = Agent(chats[name], FAMILIES[name])
    for _, continuation, _, messages in play(agent, run, faithful=False):
        again = agent.replayed()
        asked = again.extend(messages, continuation.request.tools)
        expected = agent.session.extend(messages, continuation.request.tools)
        assert (asked.prompt, asked.rendered, asked.request) == (expected.prompt, expected.rendered, expected.request)
        assert [turn.record() for turn in again.turns] == [turn.record() for turn in agent.session.turns]
        for one, other in zip(again.trajectories(0.5), agent.session.trajectories(0.5), strict=True):
            assert (one.tokens == other.tokens).all()
            assert (one.turns, one.outcome) == (other.turns, other.outcome)


def continues(turn: RecordedTurn, continuation: Continuation, agent: Agent, text: str) -> bool:
    """Whether a request continues a turn, by the text of its tokens: here the policy writes as the template renders."""
    recorded, request = turn.conversation, continuation.request
    kept = agent.text(path_tokens(turn)).replace("<|endoftext|>", "<|im_end|>").replace("<|eom_id|>", "<|eot_id|>")
    return (
        text.startswith(kept)
        and recorded.messages == request.messages[: len(recorded.messages)]
        and recorded.tools == request.tools
    )


@of_each_family(40)
@given(run=runs)
def test_a_request_continues_the_deepest_turn_that_the_template_does_not_rewrite(
    chats, name, run
):  # agents-2, agents-5
    agent = Agent(chats[name], FAMILIES[name])
    for before, continuation, _, messages in play(agent, run, faithful=True, all_reasoning=True):
        sent = Conversation.of(messages, continuation.request.tools)
        assert continuation.request == sent
        text = agent.chat.render_text(sent.messages, True, sent.tools)
        prompt = agent.text(continuation.prompt).replace("<|endoftext|>", "<|im_end|>")
        assert prompt.replace("<|eom_id|>", "<|eot_id|>") == text
        known = [turn for turn in agent.session.turns[:before] if continues(turn, continuation, agent, text)]
        deepest = max((len(turn.conversation.messages) for turn in known), default=0)
        parent = continuation.parent
        assert (0 if parent is None else len(parent.conversation.messages)) == deepest


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.appends_only])
@given(run=st.lists(steps, min_size=1, max_size=5))
@settings(max_examples=40)
def test_a_linear_conversation_is_one_trajectory_where_the_template_only_appends(chats, name, run):
    agent = Agent(chats[name], FAMILIES[name])
    messages = [system("a"), user("b")]
    for step in run:
        answer = answer_of(step, agent.family)
        agent.say(messages, answer, tokens=step.tokens)
        messages = [*messages, answer]
        messages += question(messages, step, agent.family)
    (one,) = agent.session.trajectories(1.0)
    assert one.trained_tokens == sum(len(step.tokens) for step in run)


@given(run=st.lists(steps, min_size=1, max_size=6), sends=st.lists(st.booleans(), min_size=6, max_size=6))
@settings(max_examples=40)
def test_tool_calls_with_reasoning_are_one_trajectory_whether_clients_send_it_back_or_not(chats, run, sends):
    agent = Agent(chats["qwen3"], FAMILIES["qwen3"])
    messages = [user("b")]
    for step, sends_reasoning in zip(run, sends, strict=False):
        answer = assistant(step.text, step.reasoning, {"x": step.text})
        agent.say(messages, answer, tokens=step.tokens)
        sent = answer if sends_reasoning else {**answer, "reasoning_content": None}
        messages = [*messages, sent, tool(step.text)]
    assert len(agent.session.trajectories(1.0)) == 1


@given(text=words, reasoning=st.none() | words, calls=st.integers(0, 2))
def test_a_canonical_message_is_canonical(text, reasoning, calls):
    message = canonical(assistant(text, reasoning, *[{"x": text}] * calls))
    assert canonical(json.loads(json.dumps(message.as_dict()))) == message
