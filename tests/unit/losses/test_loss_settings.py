"""Settings of the loss that cannot work, or have no effect, are refused with the reason."""

import math
from typing import Any

import pytest

from goaly.base.config.check import check
from goaly.base.config.schema import plain
from goaly.losses.objective import PolicyObjective
from goaly.losses.policy_losses import LOSSES
from goaly.losses.settings import LossSettings, Rejection
from tests.unit.losses.tokens_by_hand import ABOVE_3


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            dict(name="pop"),
            "name=pop: there is no such loss; known are ppo, grpo, dr_grpo, dapo, cispo, gspo, gspo_token, sapo, "
            "reinforce, dppo, and your own as package.module:function",
        ),
        (
            dict(name="sapo", options={"clip_high": 0.3}),
            "options.clip_high=0.3: the loss sapo does not take it, its options are positive, negative; ppo, grpo, "
            "dr_grpo, dapo, cispo, gspo, gspo_token take it",
        ),
        (dict(options={"clip_low": 2}), "options.clip_low=2: must be between 0 and 1"),
        (dict(options={"clip_low": "x"}), "options.clip_low=x: must be a number"),
        (dict(name="ppo", options={"dual_clip": 0.5}), "options.dual_clip=0.5: must be at least 1, or null"),
        (
            dict(name="dppo", options={"divergence": "js"}),
            "options.divergence=js: must be one of total_variation, kl",
        ),
        (dict(name="dr_grpo"), "constant_length: is not set, the aggregation sequence_sum needs it"),
        (dict(constant_length=9), "constant_length=9: has no effect, the aggregation is token_mean"),
        (dict(importance_cap=0, proximal="trainer"), "importance_cap=0: must be above 0, or null"),
        (
            dict(importance_cap=math.inf, proximal="trainer"),
            "importance_cap=inf: must be a finite number, or null",
        ),
        (
            dict(importance_floor_positive=3.0, proximal="trainer"),
            "importance_floor_positive=3.0: must be at most loss.importance_cap=2.0",
        ),
        (
            dict(importance_cap_negative=0.1, importance_floor=0.5, proximal="trainer"),
            "importance_cap_negative=0.1: must be at least loss.importance_floor=0.5",
        ),
        (
            dict(importance_cap_negative=1.0),
            "importance_cap_negative=1.0: has no effect, with loss.proximal=sampler the weight is 1",
        ),
        (
            dict(name="gspo", proximal="trainer"),
            "importance=token: must be sequence or geometric, because with loss.proximal=trainer the weight goes with "
            "the ratio, and the loss gspo has one ratio a sequence",
        ),
        (
            dict(importance="sequence"),
            "importance=sequence: has no effect, with loss.proximal=sampler the weight is 1",
        ),
        (
            dict(importance_cap=5.0),
            "importance_cap=5.0: has no effect, with loss.proximal=sampler the weight is 1",
        ),
        (
            dict(rejections=(ABOVE_3, ABOVE_3)),
            "rejections.1: must differ from earlier rules, one of which is ratio by token",
        ),
        (
            dict(importance_floor=0.5),
            "importance_floor=0.5: has no effect, with loss.proximal=sampler the weight is 1",
        ),
        (
            dict(proximal="trainer", importance_floor=2.0),
            "importance_floor=2.0: must be below loss.importance_cap=2.0",
        ),
        (dict(importance_floor=0, proximal="trainer"), "importance_floor=0: must be above 0, or null"),
        (
            dict(rejections=(Rejection(measure="ratio", level="token", high=3.0),)),
            "rejections.0.policy=proximal: has no effect, with loss.proximal=sampler the proximal policy is the "
            "sampler itself; current compares the policy that is trained",
        ),
        (
            dict(rejections=(Rejection(measure="k3", level="token", policy="current"),)),
            "rejections.0.high: is not set, and neither is loss.rejections.0.low: one is needed",
        ),
        (dict(entropy_coef=-1.0), "entropy_coef=-1.0: must be at least 0"),
        (dict(max_age=-1), "max_age=-1: must be at least 0, or null"),
        (dict(denominator="after"), "denominator=after: has no effect, nothing is left out"),
        (dict(kl_coef=-1.0), "kl_coef=-1.0: must be at least 0"),
        (dict(kl_coef=math.inf), "kl_coef=inf: must be a finite number"),
        (dict(kl_estimator="k1"), "kl_estimator=k1: has no effect, loss.kl_coef is 0"),
    ],
)
def test_settings_that_can_not_work_or_have_no_effect_are_refused(given: dict[str, Any], problem: str):
    assert check(LossSettings, plain(given), "loss")[1] == [f"loss.{problem}"]
    with pytest.raises(ValueError, match=r"[Ll]oss"):
        PolicyObjective(LossSettings(**given))


def test_a_rejection_needs_bounds_in_order():
    assert Rejection(measure="k3", level="token").problems("r.") == [
        "r.high: is not set, and neither is r.low: one is needed"
    ]
    for low in (0.5, 1.0):
        problem = f"r.low={low}: must be below r.high=0.5"
        assert Rejection(measure="k3", level="token", low=low, high=0.5).problems("r.") == [problem]
    for measure in ("k1", "log_ratio"):  # these may be below 0
        assert Rejection(measure=measure, level="token", low=-0.5, high=0.0).problems("r.") == []


@pytest.mark.parametrize("measure", ["ratio", "k2", "k3", "binary_kl"])
def test_a_bound_that_rejects_nothing_or_all_is_refused(measure):
    def problems(low: float | None, high: float | None) -> list[str]:
        return check(Rejection, {"measure": measure, "level": "token", "low": low, "high": high}, "r")[1]

    assert problems(1e-4, 0.5) == []
    for bound in (0.0, -1.0):
        said = f"={bound}: must be above 0, or null: no {measure} is below 0"
        assert problems(bound, None) == [f"r.low{said}"]
        assert problems(None, bound) == [f"r.high{said}"]
    assert problems(None, math.inf) == ["r.high=inf: must be a finite number, or null"]
    assert problems(-math.inf, 1.0) == ["r.low=-inf: must be a finite number, or null"]


def test_the_help_of_the_setting_names_every_loss():
    from goaly.base.config.help import docs

    assert all(name in docs(LossSettings)["name"] for name in LOSSES.names)
