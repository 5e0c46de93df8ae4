"""The settings that a resumed run may change.

Its log and its checkpoints stay valid only if the settings that they depend on stay the same.
"""

from collections.abc import Iterator
from typing import Any

from goaly.base.config.schema import join, plain

MAY_CHANGE = (
    "steps",
    "run_dir",
    "trainer",
    "trainer.lora.save",
    "critic",
    "reference.pp",
    "reference.fsdp",
    "reference.tp",
    "reference.cp",
    "reference.ep",
    "reference.threads",
    "reference.offload",
    "generator",
    "rollout",
    "live",
    "reward",
    "weights",
    "hosts",
    "telemetry",
    "checkpoint",
    "evaluation",
    "guard",
    "save",
    "moe.compare_every",
)
"""Settings, or whole sections of them, that a resumed run may change. The longer name of this and `KEPT` counts."""

KEPT = {
    "trainer.minibatches": "the rows of the logged batches depend on it",
    "trainer.temperature": "the log-probs of the logged groups depend on it",
    "trainer.lora": "the checkpoints have adapters of these settings, or the whole model without them",
    "critic.path": "the checkpoints have another model",
    "generator.seed": "the prompts that run again would be answered differently",
    "backlog": "the logged groups and batches depend on it",
    "prompts": "the data position belongs to these prompts",
    "model": "the checkpoints have this model",
    "moe": "the logged groups have choices of experts only if they are replayed",
    "chat": "the logged groups were rendered by it",
    "sampling": "the logged groups were sampled by it",
    "advantages": "the logged batches depend on it",
    "loss": "the published versions were trained by it; `python -m goaly.replay` retrains a run with another one",
    "reference": "the annotated batches depend on it",
}
"""Why other settings stay as they are."""


def refused(before: object, after: object) -> Iterator[str]:
    """A line for each setting of a run that differs and may not."""
    for key, old, new in changes(plain(before), plain(after)):
        nearest = max((name for name in (*MAY_CHANGE, *KEPT) if f"{key}.".startswith(f"{name}.")), key=len, default="")
        if nearest not in MAY_CHANGE:
            why = KEPT.get(nearest, "the run was started with it")
            yield f"{key}={new}: must stay {old} in a resumed run, because {why}"


def changes(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each key whose plain value differs, with both values."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            yield from changes(before.get(name), after.get(name), join(path, name))
    elif before != after:
        yield path, before, after
