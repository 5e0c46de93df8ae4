"""Settings of the backlog: what has no effect or cannot work is refused, and the bound on a token's age."""

from typing import Any

import pytest

from goaly.backlog.settings import BacklogSettings
from goaly.base.config.check import check


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (dict(order="completion", window=3), "window=3: has no effect, backlog.order is completion"),
        (dict(max_length_weight=2.0), "max_length_weight=2.0: has no effect, backlog.length_correction is none"),
        (dict(max_no_signal_share=0.5), "max_no_signal_share=0.5: has no effect, backlog.dynamic_sampling is off"),
        (
            dict(dynamic_sampling=True, group_size=1),
            "group_size=1: must be at least 2 where backlog.dynamic_sampling is on, or no group has a signal",
        ),
        (
            dict(length_correction="inverse_propensity"),
            "length_correction=inverse_propensity: must be none where backlog.order is windowed, which leaves nothing "
            "to correct",
        ),
        (dict(groups_per_step=0), "groups_per_step=0: must be at least 1"),
        (dict(max_staleness=-1), "max_staleness=-1: must be at least 0"),
        (dict(max_length_weight=0.5), "max_length_weight=0.5: must be at least 1"),
        (dict(max_no_signal_share=1.0), "max_no_signal_share=1.0: must be above 0 and below 1"),
    ],
)
def test_settings_that_can_not_work_or_have_no_effect_are_refused(given: dict[str, Any], problem: str) -> None:
    assert check(BacklogSettings, given, "backlog")[1] == [f"backlog.{problem}"]


@pytest.mark.parametrize(
    "given",
    [
        dict(window=3, group_size=1),
        dict(dynamic_sampling=True, group_size=2, max_no_signal_share=0.5),
        dict(order="completion", length_correction="inverse_propensity", max_length_weight=2.0),
    ],
)
def test_settings_that_work_together_are_accepted(given: dict[str, Any]) -> None:
    assert check(BacklogSettings, given, "backlog")[1] == []


def test_a_token_is_at_most_as_old_as_the_staleness_and_what_a_window_adds() -> None:
    def oldest(**given: Any) -> str:
        return repr(BacklogSettings(groups_per_step=3, **given).max_age)

    assert oldest(max_staleness=2, window=1) == "2"
    assert [oldest(max_staleness=2, window=window) for window in (2, 4, 5, 8)] == ["3", "3", "4", "5"]
    assert oldest(max_staleness=0, window=8) == "0"  # a step has no other groups to choose from
    assert oldest(max_staleness=0, order="completion") == "0"
    assert oldest(max_staleness=1, order="completion") == "None"
