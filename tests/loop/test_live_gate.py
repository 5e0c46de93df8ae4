"""The live app with a gate: clients see a new version only while it is on trial or once it is promoted (live-2)."""

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
from launched import REWARDED, START_SECONDS, LaunchedRun
from test_live import LIVE, address, corrected, keys, until

from goaly.live.status import status_text

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
__all__ = ["keys"]

GATE = [
    REWARDED,
    "generator.replicas=2",
    "weights.slots=4",
    "live.candidate_share=0.5",
    "live.gate.margin=0.3",
    "live.gate.error_rate=0.2",
    "live.gate.mix_bound=0.7",
    "live.gate.baseline_samples=2",
]


def decided(run: LaunchedRun) -> list[dict[str, Any]]:
    file = run.folder / "gate.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [one for one in map(json.loads, lines) if one["kind"] == "Decided"]


def test_versions_are_served_after_their_trial(keys: None, launch: Callable[..., LaunchedRun]) -> None:
    run = launch(*LIVE, *GATE, "steps=100000", app="live")
    url = address(run)
    client, root = openai.OpenAI(base_url=url, api_key="app-token", timeout=START_SECONDS), url.removesuffix("/v1")
    seen: set[str] = set()
    asked = 0

    def promoted() -> bool:
        nonlocal asked
        seen.add(corrected(client, root, asked % 50))
        asked += 1
        return any(one["decision"] == "promoted" for one in decided(run))

    until(promoted, run)
    records = [json.loads(line) for line in (run.folder / "gate.jsonl").read_text().splitlines()]
    tried = {str(one["candidate"]) for one in records if one["kind"] == "Chosen"}
    assert seen <= {"0", *tried}
    version = next(one["candidate"] for one in decided(run) if one["decision"] == "promoted")
    until(lambda: corrected(client, root, 7) == str(version) or len(decided(run)) > 1, run)
    text = status_text(run.folder)
    assert "gate     serves version" in text
    assert "canary: not_worse; mean difference" in text
