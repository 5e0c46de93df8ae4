"""Which session a request continues, what is recorded of it, and what the next request says of the answers before."""

from pathlib import Path

import pytest
from live_traffic import ONE, TWO, answered, asked, opened, said, user

from goaly.live.traffic import Client, Traffic
from goaly.live.turn import Reaction, ReactionKind, TurnEnd
from goaly.live.turn_samples import group_of
from goaly.prompts.settings import ChatSettings
from goaly.prompts.tokenizer import ChatTokenizer


@pytest.fixture
def traffic(tokenizer: ChatTokenizer, tmp_path: Path) -> Traffic:
    return opened(tokenizer, tmp_path)


def test_the_next_message_goes_to_the_turn_that_it_answers(traffic: Traffic):
    answered(traffic, ONE, [user("3+4?")], "8")
    place = asked(traffic, ONE, [user("3+4?"), said("8"), user("no, 7")])
    (turn,) = traffic.collection.turns.values()
    assert place.session == turn.session
    assert turn.reactions == [Reaction(kind=ReactionKind.REPLY, text="no, 7")]


def test_the_next_message_goes_to_its_turn_though_the_template_does_not_continue_that(
    tokenizer: ChatTokenizer, tmp_path: Path
):
    (tmp_path / "plain.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    plain = ChatTokenizer(tokenizer.folder, ChatSettings(template_file=str(tmp_path / "plain.jinja")))
    traffic = opened(plain, tmp_path)
    answered(traffic, ONE, [user("3+4?")], "8")
    place = asked(traffic, ONE, [user("3+4?"), said("8"), user("no, 7")])
    assert place.continuation.parent is None
    (turn,) = traffic.collection.turns.values()
    assert turn.reactions == [Reaction(kind=ReactionKind.REPLY, text="no, 7")]
    answered(traffic, ONE, [user("3+4?"), said("8"), user("no, 7")], "7")
    answered(traffic, ONE, [user("3+4?")], "8")
    again = asked(traffic, ONE, [user("3+4?"), said("8"), user("no, 7")])
    assert again.session != place.session  # the session of the equal conversation that has not gone on


def test_a_key_finds_nothing_of_another_key(traffic: Traffic):
    """live-25"""
    answered(traffic, ONE, [user("3+4?")], "8")
    place = asked(traffic, TWO, [user("3+4?"), said("8"), user("no, 7")])
    (turn,) = traffic.collection.turns.values()
    assert place.session != turn.session
    assert place.continuation.parent is None
    assert turn.reactions == []
    good = Reaction(kind=ReactionKind.FEEDBACK, score=1.0)
    assert traffic.feedback("two", turn.session, None, good) is None
    assert traffic.feedback("two", "own", "r0", good) is None
    assert not traffic.end("two", turn.session)
    assert traffic.feedback("one", "own", "r0", good) == 1


def test_a_retry_and_an_edit_say_something_of_the_answers_before(traffic: Traffic):
    begun = [user("3+4?"), said("8"), user("explain")]
    answered(traffic, ONE, begun[:1], "8")
    answered(traffic, ONE, begun, "because")
    asked(traffic, ONE, begun)
    asked(traffic, ONE, [*begun[:2], user("explain it better")])
    first, second = traffic.collection.turns.values()
    assert [one.kind for one in second.reactions] == [ReactionKind.RETRY, ReactionKind.EDIT]
    assert [one.text for one in first.reactions] == ["explain", "explain it better"]


def test_equal_questions_of_two_users_are_two_sessions_and_siblings(traffic: Traffic):
    answered(traffic, ONE, [user("3+4?")], "8")
    answered(traffic, ONE, [user("3+4?")], "7")
    first, second = traffic.collection.turns.values()
    assert first.session != second.session
    assert first.siblings == second.siblings
    assert first.reactions == second.reactions == []


def test_a_session_that_the_client_names_has_all_its_requests(traffic: Traffic):
    named = Client(key="one", session="mine")
    answered(traffic, named, [user("3+4?")], "8")
    answered(traffic, named, [user("a summary")], "none")
    first, second = traffic.collection.turns.values()
    assert first.session == second.session
    other = asked(traffic, Client(key="two", session="mine"), [user("3+4?")])
    assert other.session != first.session  # live-25


@pytest.mark.parametrize("reason", ["opted_out", "other_distribution"])
def test_a_request_that_is_left_out_is_counted_and_not_written(traffic: Traffic, tmp_path: Path, reason: str):
    """live-26"""
    assert answered(traffic, ONE, [user("a secret")], "8", reason) is None
    assert traffic.left_out == {reason: 1}
    assert not any(b"secret" in file.read_bytes() for file in tmp_path.rglob("*.jsonl"))


def test_what_the_redaction_hook_changes_is_never_written(tokenizer: ChatTokenizer, tmp_path: Path):
    """live-26"""
    traffic = opened(tokenizer, tmp_path, redact=lambda text: text.replace("secret", "[redacted]"))
    answered(traffic, ONE, [user("3+4?")], "8")
    assert answered(traffic, ONE, [user("3+4?"), said("8"), user("a secret")], "ok") is None
    assert traffic.left_out == {"redacted": 1}
    (turn,) = traffic.collection.turns.values()
    assert turn.reactions[0].text == "a [redacted]"
    assert not any(b"secret" in file.read_bytes() for file in tmp_path.rglob("*.jsonl"))


def test_a_restart_goes_on_with_the_sessions_and_their_tokens(tokenizer: ChatTokenizer, tmp_path: Path):
    """live-24"""
    before = opened(tokenizer, tmp_path)
    answered(before, ONE, [user("3+4?")], "8")
    traffic = opened(tokenizer, tmp_path)
    turn = answered(traffic, ONE, [user("3+4?"), said("8"), user("no, 7")], "7")
    assert turn is not None
    assert turn.parent is not None
    (known,) = before.collection.turns
    assert turn.parent.tokens.tolist() == before.turn(known).tokens.tolist()
    first, second = traffic.collection.turns.values()
    assert first.session == second.session
    assert first.reactions[0].text == "no, 7"


def test_the_file_of_a_session_goes_when_it_is_over(traffic: Traffic, tmp_path: Path):
    answered(traffic, ONE, [user("3+4?")], "8")
    (turn,) = traffic.collection.turns.values()
    traffic.end("one", turn.session)
    assert len([*tmp_path.glob("sessions/*")]) == 1
    traffic.clock.now = 10_000.0  # type: ignore[attr-defined]
    traffic.sweep()
    assert traffic.collection.ended == {TurnEnd.NO_OUTCOME: 1}
    assert [*tmp_path.glob("sessions/*")] == []


def test_a_conversation_goes_on_in_another_session_after_its_own_has_ended(traffic: Traffic):
    answered(traffic, ONE, [user("3+4?")], "8")
    (turn,) = traffic.collection.turns.values()
    traffic.collection.close(turn.session, "size")
    place = asked(traffic, ONE, [user("3+4?"), said("8"), user("no, 7")])
    assert place.session != turn.session
    assert place.continuation.parent is None


def test_a_full_disk_stops_recording_and_nothing_else(traffic: Traffic, monkeypatch: pytest.MonkeyPatch):
    def full(record: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(traffic.log, "write", full)
    answered(traffic, ONE, [user("3+4?")], "8")
    assert answered(traffic, ONE, [user("5+4?")], "8") is None
    assert traffic.broken == "no space left"
    assert traffic.left_out == {"not_written": 1}


def test_each_turn_of_a_batch_is_trained_once_and_turns_of_a_path_share_a_trajectory(traffic: Traffic):
    begun = [user("3+4?"), said("8"), user("no, 7")]
    answered(traffic, ONE, begun[:1], "8")
    answered(traffic, ONE, begun, "7")
    answered(traffic, ONE, begun, "seven")
    turns = list(traffic.collection.turns.values())
    for number, turn in enumerate(turns):
        traffic.collection.hear(turn.id, Reaction(kind=ReactionKind.FEEDBACK, score=float(number)), 0.0)
    group = group_of(5, [(turn, traffic.turn(turn.id)) for turn in turns], 8)
    assert len(group.samples) == 2
    assert group.left == 6
    notes = [note for sample in group.samples for note in sample.notes]
    assert sorted(note["turn"] for note in notes) == sorted(turn.id for turn in turns)
    assert sum(group.trained_tokens) == sum(len(traffic.turn(turn.id).tokens) for turn in turns)
    assert sorted(group.rewards) == [1.0, 2.0]
    for sample in group.samples:
        trained_T = sample.tokens["trained"]
        assert set(sample.tokens["sampler_versions"][trained_T].tolist()) == {3}
        for note in sample.notes:
            assert trained_T[note["start"] : note["stop"]].all()
