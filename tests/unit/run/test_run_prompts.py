"""A resumed run asks the prompts that the run would have asked, each of them once (run-10)."""

import json

from hypothesis import given
from hypothesis import strategies as st

from goaly.backlog.events import Ticket
from goaly.journal.records import Drawn
from goaly.journal.run_log import Recovered
from goaly.prompts.curriculum import Passes
from goaly.prompts.mixture import prompt_mixture
from goaly.prompts.settings import ArithmeticSettings, CurriculumSettings, PromptSettings, SourceSettings
from goaly.run.run_prompts import RunPrompts

SETTINGS = PromptSettings(
    task=None,
    sources=(
        SourceSettings(name="short", task="arithmetic", arithmetic=ArithmeticSettings(max_digits=2)),
        SourceSettings(name="long", task="arithmetic", weight=2.0),
    ),
    curriculum=CurriculumSettings(),
)
PASSES = [{"short": Passes(samples=8, passed=number)} for number in range(9)]


def ticket(index: int) -> Ticket:
    return Ticket(index=index, min_version=0)


@given(draws=st.lists(st.booleans(), max_size=30), killed_at=st.integers(0, 30), ended=st.sets(st.integers(0, 30)))
def test_the_prompts_go_on_where_the_log_ends(draws: list[bool], killed_at: int, ended: set[int]) -> None:
    records: list[Drawn] = []
    whole, killed = RunPrompts(prompt_mixture(SETTINGS)), RunPrompts(prompt_mixture(SETTINGS))
    killed.begin(Recovered(), records.append)
    expected, learned = {}, 0
    for number, draw in enumerate(draws):  # draws, and lessons of batches between them
        for prompts in (whole, killed) if number < killed_at else (whole,):
            if draw:
                expected.setdefault(number, []).append(prompts.of(ticket(number)).id)
            else:
                prompts.learn(learned, PASSES[learned % len(PASSES)])
        learned += not draw
        if number == killed_at - 1:
            trained = learned
    trained = learned if killed_at > len(draws) else trained if killed_at else 0
    last = json.loads(json.dumps(records[-1].mixture)) if records else None
    since = records[-1].learned if records else 0
    recovered = Recovered(
        policy_version=trained,
        prompts={drawn.ticket: drawn.prompt for drawn in records if drawn.ticket not in ended},
        mixture=last,
        passes=[PASSES[batch % len(PASSES)] for batch in range(since, trained)],
    )
    resumed = RunPrompts(prompt_mixture(SETTINGS))
    resumed.begin(recovered, records.append)
    for drawn in recovered.prompts:
        assert resumed.of(ticket(drawn)).id == expected[drawn][0]
    done = 0
    for number, draw in enumerate(draws):
        if draw and number >= killed_at:
            assert resumed.of(ticket(number)).id == expected[number][0]
        elif not draw:
            resumed.learn(done, PASSES[done % len(PASSES)])  # those before the kill are learned already
            done += 1


def test_draws_that_died_with_the_hub_are_made_again_and_weights_that_were_set_stay_set() -> None:  # run-10
    prompts, other = (RunPrompts(prompt_mixture(SETTINGS)) for _ in range(2))
    records: list[Drawn] = []
    prompts.begin(Recovered(), records.append)
    drawn = [prompts.of(ticket(number)).id for number in range(4)]
    prompts.begin(Recovered(), records.append)
    assert [prompts.of(ticket(number)).id for number in range(4)] == drawn

    prompts.set_weights({"short": 0.0})
    before_them = Recovered(mixture=json.loads(json.dumps(records[3].mixture)))
    prompts.begin(before_them, records.append)
    other.begin(before_them, records.append)
    other.set_weights({"short": 0.0})
    assert [prompts.of(ticket(number)).id for number in range(4, 9)] == [
        other.of(ticket(number)).id for number in range(4, 9)
    ]
