"""Live traffic without a server: what tests of it share."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from goaly.agents.turn import RecordedTurn
from goaly.generate.policy import Completion
from goaly.generate.request import Finish
from goaly.live.collection import CollectionLimits
from goaly.live.log import LiveLog
from goaly.live.traffic import Client, RequestPlace, Traffic
from goaly.prompts.tokenizer import ChatTokenizer

ONE, TWO = Client(key="one"), Client(key="two")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def opened(tokenizer: ChatTokenizer, folder: Path, **changes: Any) -> Traffic:
    facts: dict[str, Any] = {"limits": CollectionLimits(), "row_length": 1000, "clock": Clock(), **changes}
    return Traffic(chat=tokenizer, log=LiveLog(folder), **facts)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def asked(traffic: Traffic, client: Client, messages: Sequence[Mapping[str, Any]]) -> RequestPlace:
    place = traffic.place(client, messages, None, None, None)
    traffic.said(place)
    return place


def answered(
    traffic: Traffic, client: Client, messages: Sequence[Mapping[str, Any]], text: str, reason: str | None = None
) -> RecordedTurn | None:
    place = asked(traffic, client, messages)
    tokens = torch.tensor([*traffic.chat.encode(text), traffic.chat.stop_token_ids[0]])
    made = Completion(
        prompt=place.continuation.prompt,
        tokens=tokens,
        logprobs=-torch.ones(len(tokens)),
        versions=torch.full((len(tokens),), 3, dtype=torch.int32),
        finish=Finish.STOP,
        text=text,
    )
    number = f"r{traffic.collection.recorded}"
    return traffic.record(client, place, made, said(text), response=number, malformed=0, reason=reason)
