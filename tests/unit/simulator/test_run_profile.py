"""A profile of a run whose records were written with known service times."""

import json
from pathlib import Path

import pytest

from goaly.base.errors import ConfigError
from goaly.simulator.intervals import Interval, Union
from goaly.simulator.run_profile import profile_of_run

GROUPS, SIZE, STEPS = 2, 2, 30
PROMPT = 5
DECODE_SECONDS, STAGE, PULL, APPLY, TICKET, QUEUE, BATCH, REPORT = 0.01, 0.02, 0.03, 0.01, 0.05, 0.04, 0.06, 0.07
FIXED, PER_TOKEN = 0.3, 0.002


def written(folder: Path) -> Path:
    """The folder of a synchronous run of such times; all answers of a step have 40, 50, ... tokens."""
    spans, metrics, now, steps, tokens = [], [], 1000.0, 0, 0

    def span(name: str, start: float, stop: float, **args) -> None:
        times = {"start_ns": round(start * 1e9), "stop_ns": round(stop * 1e9)}
        spans.append({"pid": 1, "name": name, "track": "t", "thread": 1, "task": None, "args": args, **times})

    for step in range(STEPS):
        length = 40 + 10 * (step % 7)
        asked = now + TICKET
        began = asked + (PULL if step else 0)
        ended = began + length * DECODE_SECONDS
        for ticket in range(step * GROUPS, (step + 1) * GROUPS):
            for sample in range(SIZE):
                request = f"{ticket}.{sample}.0"
                span("generation", asked, ended, request=request, prompt_tokens=PROMPT, tokens=length)
                span("generation", asked, ended, request=request, tokens=length)
        formed = ended + QUEUE
        for ticket in range(step * GROUPS, (step + 1) * GROUPS):
            span("queue_wait", formed - 0.001, formed, ticket=ticket)
        batch_tokens = GROUPS * SIZE * (PROMPT + length)
        trained = formed + BATCH + FIXED + PER_TOKEN * batch_tokens
        span("train", formed + BATCH, trained, batch=step, version=step)
        now = trained + STAGE
        span("publish", trained, now, version=step + 1)
        span("apply", now + PULL + TICKET - APPLY, now + PULL + TICKET, version=step + 1)
        steps, tokens = steps + length, tokens + GROUPS * SIZE * length
        counts = {"generator/steps": steps, "generator/tokens": tokens, "generator/updates": step + 1}
        seconds = {"generator/stall_seconds": 0.0, "run/seconds": now - 1000.0, "step/tokens": batch_tokens}
        metrics.append({"step": step + 1, **counts, **seconds})
    (folder / "spans").mkdir(parents=True)
    (folder / "spans" / "generator-0.jsonl").write_text("".join(json.dumps(one) + "\n" for one in spans))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in metrics))
    settings = {"steps": STEPS, "backlog": {"groups_per_step": GROUPS, "group_size": SIZE, "max_staleness": 0}}
    (folder / "config.yaml").write_text(json.dumps(settings))
    return folder


def test_service_times_are_those_of_the_run(tmp_path):
    profile = profile_of_run(written(tmp_path / "run"))
    (training,), (engine,) = profile.training, profile.engines
    assert training.fixed_seconds == pytest.approx(FIXED, rel=0.01)
    assert training.seconds_per_token == pytest.approx(PER_TOKEN, rel=0.01)
    assert engine.step_seconds(GROUPS * SIZE) == pytest.approx(DECODE_SECONDS, rel=0.02)
    assert profile.updates.stage_seconds == pytest.approx(STAGE)
    assert profile.loop.batch_seconds == pytest.approx(BATCH)
    assert profile.loop.ticket_seconds == pytest.approx(TICKET)
    assert profile.loop.trainer_slowdown == 1  # the engine never ran beside it


def test_episodes_are_those_of_the_run(tmp_path):
    groups = profile_of_run(written(tmp_path / "run")).episodes.groups
    assert len(groups) == STEPS * GROUPS
    assert {len(group) for group in groups} == {SIZE}
    assert [group[0].answer_tokens for group in groups[:4]] == [(40,), (40,), (50,), (50,)]
    assert groups[0][0].prompt_tokens == (PROMPT,)


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="must be the folder of a run; it has no config"):
        profile_of_run(tmp_path)


def test_a_union_covers_time_once():
    covered = Union([Interval(0, 2), Interval(1, 3), Interval(5, 6)])
    assert covered.within(Interval(0, 10)) == pytest.approx(4)
    assert covered.within(Interval(2.5, 5.5)) == pytest.approx(1)
    assert covered.within(Interval(3, 5)) == 0
