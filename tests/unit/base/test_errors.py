"""Errors that cross to other processes: as they are, or as text where the other process could not build them again."""

import json
import pickle

import cloudpickle
import httpx
import openai
import pytest

from goaly.base.actors import SupervisionError
from goaly.base.errors import EpisodeError, ForeignError, cause_of, portable
from goaly.generate.request import InvalidRequest


class NeedsMore(ValueError):
    """An error of a script, which pickle cannot build again."""

    def __init__(self, message: str, *, status: int):
        super().__init__(message)
        self.status = status


def rate_limited() -> Exception:
    response = httpx.Response(429, request=httpx.Request("POST", "http://x/v1"))
    return openai.RateLimitError("slow down", response=response, body=None)


def unreadable() -> Exception:
    return json.JSONDecodeError("no JSON", "[", 1)


KNOWN = [
    EpisodeError("a reason"),
    InvalidRequest("top_p"),
    OSError(28, "No space left", "/x"),
    KeyError("a"),
    SupervisionError("an actor of this one died"),
]


@pytest.mark.parametrize("error", KNOWN, ids=lambda error: type(error).__name__)
def test_errors_that_every_process_knows_cross_as_they_are(error: Exception) -> None:
    assert portable(error) is error
    assert repr(pickle.loads(pickle.dumps(error))) == repr(error)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (rate_limited(), "RateLimitError: slow down"),
        (NeedsMore("busy", status=429), "NeedsMore: busy"),
        (unreadable(), "JSONDecodeError: no JSON: line 1 column 2 (char 1)"),
        (ExceptionGroup("of tools", [rate_limited(), OSError("x")]), "RateLimitError: slow down"),
    ],
)
def test_other_errors_cross_as_their_type_and_message(error: Exception, text: str) -> None:
    sent = pickle.loads(cloudpickle.dumps(portable(error)))
    assert isinstance(sent, ForeignError)
    assert (str(sent), cause_of(sent)) == (text, text)
