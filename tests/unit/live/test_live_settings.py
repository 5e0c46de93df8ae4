"""Settings and keys of live traffic that cannot work are refused, with their names."""

from pathlib import Path

import pytest

from goaly.base.errors import ConfigError
from goaly.live.keys import keys_of
from goaly.live.settings import LiveHintSettings, LiveJudgeSettings, LiveSettings
from goaly.live.turn import ReactionKind
from goaly.live.worker import limits_of


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "verifier"}, "verifier"),
        ({"kind": "verifier", "verifier": "no path"}, "package.module:function"),
        ({"kind": "endpoint"}, "url"),
        ({"kind": "endpoint", "url": "host"}, "http://"),
        ({"votes": 5}, "has no effect"),
        ({"kind": "policy", "question": "good?"}, "{answer}"),
    ],
)
def test_a_judge_that_cannot_work_is_refused(settings: dict, problem: str):
    assert problem in "\n".join(LiveJudgeSettings(**settings).problems("live.judge."))


def test_the_defaults_have_no_problem():
    assert LiveSettings().problems("live.") == []
    assert LiveJudgeSettings(kind="policy").problems("") == []


def test_a_redaction_that_is_no_path_is_refused():
    assert "live.redact" in LiveSettings(redact="mask").problems("live.")[0]


def test_keys_are_named_by_lines_or_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "keys"
    file.write_text("app secret-1\n\nother secret-2\n")
    assert keys_of(str(file)) == {"secret-1": "app", "secret-2": "other"}
    monkeypatch.setenv("GOALY_KEYS", "app=secret=1, other=secret-2")
    assert keys_of(None) == {"secret=1": "app", "secret-2": "other"}


@pytest.mark.parametrize("lines", ["app", "app a b", "one same\ntwo same"])
def test_keys_that_are_no_pairs_or_not_unique_are_refused_without_their_token(tmp_path: Path, lines: str):
    file = tmp_path / "keys"
    file.write_text(lines)
    with pytest.raises(ValueError, match="key ") as raised:
        keys_of(str(file))
    assert "same" not in str(raised.value)


def test_rewards_without_a_value_are_left_to_the_judge():
    limits = limits_of(LiveSettings(retry_reward=-0.5))
    assert limits.rewards == {ReactionKind.RETRY: -0.5, ReactionKind.MALFORMED: -1.0}


def test_an_unknown_judge_is_refused():
    with pytest.raises(ConfigError, match="kind"):
        LiveJudgeSettings(kind="oracle")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "problem"), [("{question}", "{reaction}"), ("{reaction} {x}", "{x}"), ("{", "braces")]
)
def test_a_hint_that_says_nothing_new_is_refused(text: str, problem: str):
    assert problem in "\n".join(LiveHintSettings(text=text).problems("live.hint."))
