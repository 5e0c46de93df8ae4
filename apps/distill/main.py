"""On-policy distillation, fully asynchronous: the policy writes, a teacher says how likely it finds each token.

    python -m apps.distill.main --config configs/distill/tiny.yaml

The episode and the two loops are those of `apps/grpo/main.py`: before a step the teacher annotates its batch. The
teacher is the model of the section `reference`: another folder, an earlier version of the policy, or the policy with
more in its context (`rollout.hint`, or a trajectory's `taught`). With `loss.reward_weight=0` rewards only measure.
"""

from __future__ import annotations

from apps.grpo.main import episode, grpo
from goaly.base.config import Loaded, run_cli
from goaly.base.errors import ConfigError
from goaly.plan.run_config import RunConfig


def main(loaded: Loaded[RunConfig]) -> int:
    """Distil with this config."""
    from goaly.run.launch import launch

    if loaded.config.loss.distill is None:
        raise ConfigError(["loss.distill=null: must be a section, because this script distils; `{}` has the defaults"])
    return launch(loaded, episode, grpo)


if __name__ == "__main__":
    run_cli(main, RunConfig, prog="python -m apps.distill.main", description="On-policy distillation, asynchronous.")
