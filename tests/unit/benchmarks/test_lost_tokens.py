"""Right tokens that stale data make rare: a rule that ignores the sign of the advantage leaves out what saves them."""

import pytest

from bench.lost_tokens import ARMS, learn

SEEDS, STEPS = 16, 60


@pytest.mark.parametrize(("blind", "mended"), [("stale, either sign", "stale"), ("icepop, either sign", "icepop")])
def test_a_lower_bound_for_either_sign_leaves_out_tokens_on_their_way_back_and_one_for_negative_advantages_does_not(
    blind: str, mended: str
):
    before, after = (learn(ARMS[arm], 8, SEEDS, steps=STEPS) for arm in (blind, mended))
    masked = [sum(run.rising_masked for run in runs) / SEEDS for runs in (before, after)]
    assert masked[0] > 0.002
    assert masked[1] < masked[0] / 2
    assert sum(run.lost for run in after) <= sum(run.lost for run in before)


def test_without_stale_data_no_rule_acts_and_the_losses_are_one():
    before, after = (learn(ARMS[arm], 0, 2, steps=20) for arm in ("stale, either sign", "stale"))
    assert [run.pass_at_1 for run in before] == [run.pass_at_1 for run in after]
