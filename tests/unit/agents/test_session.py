"""What continues a session's tree, what branches, and where each token is trained: one case for each kind."""

from dataclasses import replace

import pytest
import torch
from agent_sessions import TOOLS, Agent, assistant, system, tool, user
from chat_templates import FAMILIES, chat_of

from goaly.agents.session import SessionBusy, SessionEnd, SessionExhausted
from goaly.agents.settings import SessionSettings
from goaly.base.errors import EpisodeError
from goaly.generate.policy import ContextFull
from goaly.generate.request import Finish
from goaly.trajectory import EXPERT_CHOICES, Outcome


def trained(session, reward=1.0):
    """The trained tokens of each trajectory."""
    return [one.tokens["tokens"][one.tokens["trained"]].tolist() for one in session.trajectories(reward)]


def test_a_chat_of_two_turns_by_hand(agent):  # agents-1
    a = agent("tiny")
    question, other = [user("1")], [user("1"), assistant("23"), user("4")]
    first = a.say(question, assistant("23"))
    a.say(other, assistant("5"), tokens=[60, 61], finish=Finish.LENGTH)
    (one,) = a.session.trajectories(0.5)
    asked, answered, then = a.chat.encode("<|user|>1<|end|><|assistant|>"), a.written(assistant("23")), "<|user|>4"
    assert first.tokens.tolist() == answered
    added = a.chat.encode(f"{then}<|end|><|assistant|>")  # the answer's own stop token was sampled
    assert one.tokens["tokens"].tolist() == [*asked, *answered, *added, 60, 61]
    assert one.tokens["trained"].tolist() == [False] * 4 + [True] * 3 + [False] * 4 + [True] * 2
    assert one.tokens["sampler_logprobs"].tolist() == [0] * 4 + [-1 / 4096, -2 / 4096, -3 / 4096] + [0] * 4 + [
        -4 / 4096,
        -5 / 4096,
    ]
    assert one.tokens["sampler_versions"].tolist() == [-1] * 4 + [10] * 3 + [-1] * 4 + [12] * 2
    assert one.tokens["rewards"].tolist() == [0] * 12 + [0.5]
    assert [(turn.author, turn.start, turn.stop) for turn in one.turns] == [
        ("prompt", 0, 4),
        ("policy", 4, 7),
        ("environment", 7, 11),
        ("policy", 11, 13),
    ]
    assert (one.prompt_id, one.sample_index, one.environment, one.outcome) == ("q1", 2, "shop", Outcome.TRUNCATED)


def test_tool_results_continue_the_call(agent):
    a = agent()
    call = assistant("I add.", None, {"x": 1}, {"x": 2})
    chat = [system("Be brief."), user("1+1?")]
    turn = a.say(chat, call, tools=TOOLS)
    chat += [call, tool("2", "call-0"), tool("3", "call-1")]
    went_on, last = a.ask(chat, assistant("2 and 3"), tools=TOOLS)
    assert went_on.parent is turn
    assert a.text(went_on.context) == (
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert trained(a.session) == [[*turn.tokens.tolist(), *last.tokens.tolist()]]


def test_equal_requests_are_two_samples_and_what_came_before_them_is_trained_in_the_first(agent):  # agents-3
    a = agent()
    root = a.say([user("a")], assistant("b"))
    chat = [user("a"), assistant("b"), user("c")]
    one, other = a.say(chat, assistant("d")), a.say(chat, assistant("e"))
    assert (one.parent, other.parent, one.context) == (root, root, other.context)
    first, second = a.session.trajectories(1.0)
    assert trained(a.session) == [[*root.tokens.tolist(), *one.tokens.tolist()], other.tokens.tolist()]
    shared = slice(len(root.context), len(root.context) + len(root.tokens))
    assert second.tokens["tokens"][shared].tolist() == root.tokens.tolist()
    assert second.tokens["sampler_versions"][shared].tolist() == [-1] * len(root.tokens)
    assert second.tokens["sampler_logprobs"][shared].tolist() == [0] * len(root.tokens)
    assert (first.reward, second.reward) == (1.0, 1.0)


def test_an_edited_message_branches_behind_the_last_common_turn(agent):  # agents-2
    a = agent()
    first = a.say([user("a")], assistant("b"))
    a.say([user("a"), assistant("b"), user("c")], assistant("d"))
    edited = a.say([user("a"), assistant("b"), user("other"), assistant("d"), user("e")], assistant("f"))
    assert edited.parent is first
    assert a.say([user("other"), assistant("b"), user("c")], assistant("g")).parent is None
    assert a.say([user("a"), assistant("not mine"), user("c")], assistant("h")).parent is None
    assert len(a.session.trajectories(0.0)) == 4


def test_compaction_and_a_sub_agent_begin_at_the_root_and_the_first_agent_goes_on(agent):
    a = agent()
    chat = [system("You plan."), user("a")]
    plan = a.say(chat, assistant("b"))
    assert a.say([system("You search."), user("a")], assistant("found")).parent is None
    chat += [assistant("b"), user("found")]
    last = a.say(chat, assistant("c"))
    assert last.parent is plan
    assert a.say([system("You plan."), user("Summary: b, c")], assistant("d")).parent is None
    assert len(a.session.trajectories(0.0)) == 3


def test_other_tools_or_another_order_of_them_branch(agent):
    a = agent()
    first, chat = a.say([user("a")], assistant("b"), tools=TOOLS), [user("a"), assistant("b"), user("c")]
    assert a.say(chat, assistant("d"), tools=TOOLS[::-1]).parent is None
    assert a.say(chat, assistant("d")).parent is None
    assert a.say(chat, assistant("d"), tools=TOOLS).parent is first


def test_tools_that_the_template_does_not_render_branch_all_the_same(agent):
    a = agent("chatml")
    a.say([user("a")], assistant("b"), tools=TOOLS)
    assert a.say([user("a"), assistant("b"), user("c")], assistant("d")).parent is None


def test_template_arguments_are_a_part_of_the_conversation(agent):
    a = agent("qwen3")
    chat = [user("a")]
    quiet = a.session.extend(chat, template_args={"enable_thinking": False})
    assert a.text(quiet.prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert a.text(a.session.extend(chat).prompt).endswith("<|im_start|>assistant\n")
    a = agent("chatml")
    turn, chat = a.say(chat, assistant("b")), [user("a"), assistant("b"), user("c")]
    assert a.session.extend(chat, template_args={"date": "today"}).parent is None
    assert a.session.extend(chat, template_args={}).parent is turn


def test_reasoning_that_a_client_leaves_out_is_put_back_between_tool_calls(agent):
    for sent_back in (None, "I add."):
        a = agent("qwen3")
        call = assistant("", "I add.", {"x": 1})
        first = a.say([user("1+1?")], call, tools=TOOLS)
        seen = {**call, "reasoning_content": sent_back}
        went_on = a.say([user("1+1?"), seen, tool("2")], assistant("2", "It is 2."), tools=TOOLS)
        assert went_on.parent is first
        assert went_on.request.messages[1].reasoning_content == "I add."


def test_edited_reasoning_branches(agent):
    a = agent("qwen3")
    call = assistant("", "I add.", {"x": 1})
    a.say([user("1+1?")], call, tools=TOOLS)
    seen = {**call, "reasoning_content": "Something else."}
    branched, _ = a.ask([user("1+1?"), seen, tool("2")], assistant("2"), tools=TOOLS)
    assert branched.parent is None
    assert "Something else." in a.text(branched.prompt)


def test_of_two_answers_that_differ_in_their_reasoning_the_one_that_was_sent_back_goes_on(agent):
    a = agent("qwen3")
    answers = [assistant("", reasoning, {"x": 1}) for reasoning in ("First.", "Second.", None)]
    turns = [a.say([user("?")], answer, tools=TOOLS) for answer in answers]
    for answer, turn in zip(answers, turns, strict=True):
        assert a.session.extend([user("?"), answer, tool("2")], TOOLS).parent is turn


def test_a_template_that_drops_reasoning_at_the_next_question_branches_at_the_root(agent):
    a = agent("qwen3")
    a.say([user("a")], assistant("b", "Hm."))
    branched, _ = a.ask([user("a"), assistant("b", "Hm."), user("c")], assistant("d", "Hm."))
    assert branched.parent is None
    assert a.text(branched.prompt) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_where_the_deepest_turn_is_rewritten_an_earlier_one_goes_on(agent):  # agents-2
    a = agent("qwen3")
    plain, thought = assistant("b"), assistant("d", "Hm.")
    first = a.say([user("a")], plain)
    second = a.say([user("a"), plain, user("c")], thought)
    third, _ = a.ask([user("a"), plain, user("c"), thought, user("e")], assistant("f"))
    assert (second.parent, third.parent) == (first, first)
    assert a.text(third.context) == (
        "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n<|im_start|>user\ne<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_an_answer_without_tokens_is_continued_and_its_reward_kept(agent):
    a = agent()
    turn = a.say([user("a")], assistant(""), tokens=[])
    a.session.credit([turn], 2.0)
    added = a.session.extend([user("a"), assistant(""), user("c")])
    assert added.parent is turn
    assert a.text(added.context).startswith("<|im_end|>\n<|im_start|>user")
    (one,) = a.session.trajectories(0.5)
    assert (one.trained_tokens, one.tokens["rewards"].tolist()[-1]) == (0, 2.5)


def test_a_process_reward_is_on_its_turns_last_token_in_one_trajectory(agent):
    a = agent()
    root, chat = a.say([user("a")], assistant("b")), [user("a"), assistant("b"), user("c")]
    one, other = a.say(chat, assistant("d")), a.say(chat, assistant("e"))
    a.session.credit([root], 1.0)
    a.session.credit([root], 2.0)
    a.session.credit([other], 0.25)
    first, second = a.session.trajectories(10.0)
    at = len(root.context) + len(root.tokens) - 1
    assert first.tokens["rewards"].nonzero().flatten().tolist() == [at, len(first) - 1]
    assert (first.tokens["rewards"][at], first.tokens["rewards"][-1]) == (3.0, 10.0)
    assert second.tokens["rewards"].nonzero().flatten().tolist() == [len(second) - 1]
    assert (second.reward, one.parent) == (10.25, root)


@pytest.mark.parametrize("reward", [float("nan"), "1", None])
def test_a_reward_must_be_a_number(agent, reward):
    a = agent()
    turn = a.say([user("a")], assistant("b"))
    for give in (lambda: a.session.credit([turn], reward), lambda: a.session.trajectories(reward)):
        with pytest.raises(EpisodeError, match="q1"):
            give()


def test_each_trajectory_has_the_expert_choices_of_the_answers_that_it_trains(agent):  # rollout-7, trajectory-2
    a = agent()

    def say(messages, answer, number, **facts):
        continuation = a.session.extend(messages)
        tokens = a.written(answer)
        count = len(continuation.prompt) + len(tokens) - 1
        choices = torch.full((count, 2, 1), number, dtype=torch.uint8)
        completion = a.completion(continuation.prompt, tokens, choices=choices, **facts)
        return a.session.record(continuation, completion, answer)

    root, chat = say([user("a")], assistant("b"), 1), [user("a"), assistant("b"), user("c")]
    one = say(chat, assistant("d"), 2)
    say(chat, assistant("e"), 3)
    say([*chat, assistant("e"), user("f")], assistant("g"), 4, trained=False)
    known = len(root.context) + len(root.tokens) - 1
    for session in (a.session, a.replayed()):
        first, second = session.trajectories(0.0)
        length = known + 1 + len(one.context) + len(one.tokens)
        assert first.tokens[EXPERT_CHOICES][:, 0, 0].tolist() == [1] * known + [2] * (length - known - 1) + [0]
        answered = int(second.tokens["trained"].nonzero()[-1])
        assert second.tokens[EXPERT_CHOICES][:, 0, 0].tolist() == [3] * answered + [0] * (len(second) - answered)


def test_an_answer_with_a_form_is_trained_with_its_weights_once(agent):  # agents-3
    a = agent()

    def say(messages, answer, weight=None):
        continuation, tokens = a.session.extend(messages), a.written(answer)
        weights = None if weight is None else torch.full((len(tokens),), weight)
        completion = a.completion(continuation.prompt, tokens, form_weights=weights)
        return a.session.record(continuation, completion, answer)

    say([user("a")], assistant("b"), 0.5)
    chat = [user("a"), assistant("b"), user("c")]
    say(chat, assistant("d"))
    say(chat, assistant("e"), 0.25)
    say([user("x")], assistant("y"))
    for session in (a.session, a.replayed()):
        first, second, third = (one.tokens for one in session.trajectories(0.0))
        assert first["form_weights"][first["trained"]].unique_consecutive().tolist() == [0.5, 1.0]
        assert second["form_weights"][second["trained"]].unique().tolist() == [0.25]
        assert [set(one["form_weights"][~one["trained"]].tolist()) for one in (first, second)] == [{1.0}, {1.0}]
        assert "form_weights" not in third


def test_a_token_without_a_finite_log_prob_is_context_under_a_form_too(agent):  # trajectory-1
    a = agent()
    continuation, tokens = a.session.extend([user("a")]), a.written(assistant("b"))
    odd = torch.full((len(tokens),), float("nan"))
    completion = a.completion(continuation.prompt, tokens, form_weights=odd.index_fill(0, torch.tensor([0]), 0.5))
    completion.logprobs[1:] = float("-inf")
    a.session.record(continuation, completion, assistant("b"))
    for session in (a.session, a.replayed()):
        (one,) = (one.tokens for one in session.trajectories(1.0))
        assert one["trained"].nonzero().flatten().tolist() == [len(continuation.prompt)]
        assert one["sampler_logprobs"].isfinite().all()
        assert one["form_weights"].unique().tolist() == [0.5, 1.0]


def test_an_answer_that_may_not_be_trained_is_context(agent):  # agents-3
    a = agent()
    opponent = a.say([user("a")], assistant("b"), trained=False)
    mine = a.say([user("a"), assistant("b"), user("c")], assistant("d"))
    chat = [user("a"), assistant("b"), user("c"), assistant("d"), user("e")]
    assert (mine.parent, a.say(chat, assistant("f"), trained=False).parent) == (opponent, mine)
    for session in (a.session, a.replayed()):
        assert trained(session) == [mine.tokens.tolist()]
        rewards = session.trajectories(1.0)[0].tokens["rewards"]
        assert rewards.nonzero().item() == len(opponent.path_tokens()) + len(mine.context) + len(mine.tokens) - 1


def test_a_completion_of_other_tokens_is_refused(agent):  # agents-1
    a = agent()
    continuation = a.session.extend([user("a")])
    with pytest.raises(EpisodeError, match="other tokens"):
        a.session.record(continuation, a.completion(continuation.prompt[1:], [60]), assistant("b"))


def test_a_retry_finds_its_turn_and_a_key_is_used_once(agent):
    a = agent()
    turn = a.say([user("a")], assistant("b"), key="request-1")
    for session in (a.session, a.replayed()):
        assert session.turn_of("request-1").message == turn.message
        assert session.turn_of("request-2") is None
    with pytest.raises(EpisodeError, match="request-1"):
        a.say([user("a")], assistant("b"), key="request-1")


def test_limits_count_what_is_recorded_and_under_way(agent):
    a = agent(limits=SessionSettings(turns=3, parallel=2))
    a.say([user("a")], assistant("b"))
    with a.session.sampling(answers=2), pytest.raises(SessionExhausted, match="the limit is 3"), a.session.sampling():
        pass
    with pytest.raises(SessionExhausted), a.session.sampling(answers=3):
        pass
    with a.session.sampling():
        pass
    a = agent(limits=SessionSettings(turns=9, parallel=2))
    with a.session.sampling(), pytest.raises(SessionBusy), a.session.sampling(answers=2):
        pass
    for _ in range(3):
        with a.session.sampling(answers=2):
            pass


def test_the_limit_of_tokens_is_that_of_the_whole_session(agent):
    a = agent(limits=SessionSettings(tokens=4))
    a.say([user("a")], assistant("b"), tokens=[60, 61, 62])
    with a.session.sampling():
        a.say([user("c")], assistant("d"), tokens=[60])
    with pytest.raises(SessionExhausted, match="4 sampled tokens"), a.session.sampling():
        pass


def test_an_ended_session_takes_nothing_more(agent):
    a = agent()
    turn, continuation = a.say([user("a")], assistant("b")), a.session.extend([user("a")])
    a.session.credit([turn], 1.0)
    under_way = a.session.sampling()
    under_way.__enter__()
    a.session.end(SessionEnd.TIMED_OUT)
    assert not under_way.__exit__(ContextFull, ContextFull(), None)
    a.session.end(SessionEnd.COMPLETE)
    for late in (lambda: a.session.credit([turn], 1.0), lambda: a.session.add_reward(1.0)):
        with pytest.raises(SessionExhausted, match="timed_out"):
            late()
    assert a.log[-1] == {"kind": "end", "how": "timed_out"}
    for session in (a.session, a.replayed()):
        assert session.ended is SessionEnd.TIMED_OUT
        assert session.trajectories(0.0)[0].reward == 1.0
        with pytest.raises(SessionExhausted, match="timed_out"), session.sampling():
            pass
    with pytest.raises(SessionExhausted, match="timed_out"):
        a.session.record(continuation, a.completion(continuation.prompt, [60]), assistant("b"))


def test_a_replayed_session_goes_on(agent):  # agents-4
    a = agent("qwen3")
    call = assistant("", "I add.", {"x": 1})
    a.say([user("1+1?")], call, tools=TOOLS)
    again = a.replayed()
    follow = [user("1+1?"), {**call, "reasoning_content": None}, tool("2")]
    went_on = again.extend(follow, TOOLS)
    assert went_on.parent is again.turns[0]
    assert went_on.prompt == a.session.extend(follow, TOOLS).prompt


def test_messages_that_the_template_refuses_are_the_clients_error(agent):
    with pytest.raises(ValueError, match="one call only"):
        agent("llama3").session.extend([user("a"), assistant("", None, {}, {})])


def test_equal_answers_with_tool_calls_are_told_apart_by_their_ids(agent):
    a = agent()
    call = assistant("", None, {"x": 1})
    other = {**call, "tool_calls": [{**call["tool_calls"][0], "id": "call-9"}]}
    turns = [a.say([user("?")], answer) for answer in (call, other)]
    for answer, turn in zip((call, other), turns, strict=True):
        assert a.session.extend([user("?"), answer, tool("2")]).parent is turn


def test_messages_that_render_as_nothing_are_the_clients_error(tmp_path):
    a = Agent(chat_of("{% for m in messages %}{{ m.content }}{% endfor %}", [], tmp_path / "own"), FAMILIES["chatml"])
    with pytest.raises(ValueError, match="empty"):
        a.session.extend([])


def test_what_was_refused_is_known_to_a_replayed_session_until_a_shorter_chat_succeeds(agent):  # agents-4
    one = agent(limits=SessionSettings(turns=2))
    one.say([user("a")], assistant("b"))
    with pytest.raises(ContextFull), one.session.sampling():
        raise ContextFull("full")
    assert one.session.exhausted
    assert one.replayed().exhausted
    one.say([user("c")], assistant("d"))
    assert not one.session.exhausted
    assert not one.replayed().exhausted
    with pytest.raises(SessionExhausted), one.session.sampling():
        pass
    assert one.session.exhausted
    assert one.replayed().trajectories(1.0)[0].outcome == "truncated"


def test_more_answers_at_once_than_are_left_use_the_session_up_until_fewer_are_asked_for(agent):
    one = agent(limits=SessionSettings(turns=2))
    with pytest.raises(SessionExhausted), one.session.sampling(answers=3):
        pass
    assert one.session.exhausted
    one.say([user("c")], assistant("d"))
    assert not one.session.exhausted


def test_a_judgement_does_not_hide_that_the_last_answer_was_refused(agent):
    one = agent()
    one.say([user("a")], assistant("b"))
    with pytest.raises(ContextFull), one.session.sampling():
        raise ContextFull("full")
    asked = one.session.extend([user("is b right?")])
    one.session.record(asked, replace(one.completion(asked.prompt, [60]), trained=False), assistant("yes"))
    assert [each.outcome for each in one.session.trajectories(1.0)] == ["truncated"]


def test_a_call_that_a_client_has_renamed_and_rewritten_goes_on_as_it_was_sampled(agent):
    a = agent()
    call = assistant("", None, {"x": 2.0, "y": 9007199254740993})
    first = a.say([user("?")], call)
    function = {"name": "add", "arguments": '{"x":2,"y":9007199254740992}'}
    sent = {**call, "tool_calls": [{"id": "theirs", "type": "function", "function": function}]}
    chat = [user("?"), sent, tool("2", "theirs")]
    second = a.say(chat, assistant("b"))
    third = a.say([*chat, assistant("b"), user("c")], assistant("d"))
    assert (second.parent, third.parent) == (first, second)
    assert second.request.messages[2].tool_call_id == "call-0"
    assert len(a.session.trajectories(0.0)) == len(a.replayed().trajectories(0.0)) == 1


def test_of_two_calls_that_differ_in_their_ids_the_one_that_was_sent_back_without_its_reasoning_goes_on(agent):
    a = agent("qwen3")
    call = assistant("", "Hm.", {"x": 1})
    other = {**call, "tool_calls": [{**call["tool_calls"][0], "id": "call-9"}]}
    turns = [a.say([user("?")], answer, tools=TOOLS) for answer in (call, other)]
    for answer, turn in zip((call, other), turns, strict=True):
        sent, result = {**answer, "reasoning_content": None}, tool("2", answer["tool_calls"][0]["id"])
        assert a.session.extend([user("?"), sent, result], TOOLS).parent is turn


def test_a_message_that_the_template_leaves_out_is_counted_once_and_warned_of(agent, caplog, monkeypatch):
    monkeypatch.setattr("goaly.agents.bridge._TOLD", set())
    a = agent("hermes")
    said = [user("q"), {"role": "critic", "content": "be short"}]
    a.say(said, assistant("a"))
    assert a.session.left_out_messages == 1
    a.say([*said, assistant("a"), {"role": "critic", "content": ""}, user("r")], assistant("b"))
    assert a.session.left_out_messages == 1
    a.say(
        [{"role": "critic", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}], assistant("c")
    )
    assert a.session.left_out_messages == 2
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "the chat template leaves out a message of role critic: the policy does not see its text"


@pytest.mark.parametrize("name", ["parts", "llama3"])
def test_a_message_that_the_template_changes_is_not_left_out(agent, name):
    a = agent(name)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    a.say([user(" q\n"), {"role": "user", "content": parts}, tool('"r"\n')], assistant("a"))
    text = a.session.extend_text("plain")
    a.session.record(text, a.completion(text.prompt, [5]), assistant("b"))
    assert a.session.left_out_messages == 0
