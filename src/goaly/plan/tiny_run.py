"""`model.tiny`: the values that turn the config of a large run into one that a CPU runs in a minute.

They replace those of the config's files, before the overrides of the command line. They keep what
distinguishes the large run: the family and number of experts, the loss, the order, the staleness, the data's
columns, the verifier, which axes of parallelism are used, and in which number format.
"""

import string
from hashlib import blake2b
from pathlib import Path
from typing import Any

from goaly.base.errors import ConfigError
from goaly.models.architecture import Architecture
from goaly.models.catalog import shape_of
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model

FOLDER = Path("runs/tiny-models")
STEPS, CONTEXT, ANSWER_TOKENS = 4, 2048, 64
"""A published maths problem has some hundred characters, each of which is a token of the tiny model."""


def tiny_values(values: dict[str, Any]) -> dict[str, Any]:
    """By key, the values that replace those of a run's config; writes the tiny model's folder if it is not there.

    `values` may be wrong: they are checked after they are replaced.
    """
    given = values.get("model", {})
    named = {key: given[key] for key in ("path", "architecture") if isinstance(given.get(key), str)}
    path = write(shape_of(ModelSettings(**named)))
    changed: dict[str, Any] = {"model.path": str(path), "model.architecture": None, "model.tiny": False}
    for role in ("trainer", "reference", "critic"):
        if isinstance(values.get(role), dict):
            changed |= _two_ranks(role, values[role], "fsdp")
    generator = values.get("generator", {})
    alone = generator.get("tp", 1) == 1
    changed |= _two_ranks("generator", generator, "tp")
    changed["generator.replicas"] = 2 if alone and generator.get("replicas", 1) != 1 else 1
    changed |= {
        "steps": STEPS,
        "hosts": {key: _of(values, "hosts", key) for key in ("silent_seconds", "stuck_seconds")},
        "chat.template_args": {},
        "chat.template_file": None,
        "backlog.groups_per_step": max(2, min(4, _of(values, "trainer", "minibatches") or 1)),
        "backlog.group_size": 2,
        "backlog.row_length": CONTEXT,
        "generator.max_context": CONTEXT,
        "generator.max_running": 16,
        "generator.max_step_tokens": CONTEXT,
        "generator.kv_cache_gib": 0.1,
        "sampling.max_tokens": ANSWER_TOKENS,
        "rollout.workers": 1,
        "reward.workers": 1,
        "trainer.microbatch_rows": 1,
        "trainer.compile": False,
        "trainer.schedule": {"warmup_steps": 1},
    }
    if _of(values, "backlog", "dynamic_sampling"):
        changed["backlog.dynamic_sampling"] = (
            False  # a random policy solves nothing, so no group has a signal, and the run would end
        )
    if isinstance(_of(values, "advantages", "overlong"), dict):
        changed |= {"advantages.overlong.limit": ANSWER_TOKENS, "advantages.overlong.buffer": ANSWER_TOKENS // 4}
    for section in ("evaluation", "save"):
        if _of(values, section, "every") is not None:
            changed[f"{section}.every"] = STEPS // 2
    if isinstance(sets := _of(values, "evaluation", "sets"), dict):
        changed["evaluation.sets"] = {name: _small_set(one) for name, one in sets.items()}
    return changed


def write(shape: Architecture) -> Path:
    """The folder of a tiny model of this family, with as many experts; made by the first run that needs it."""
    if shape.family != "qwen3":
        raise ConfigError([f"model.tiny=true: is for models of the Qwen3 family, this one is of {shape.family}"])
    size = TinyModel(
        dim=64,
        layers=2,
        hidden_dim=32 if shape.experts else 128,
        experts=shape.experts,
        experts_per_token=shape.experts_per_token or TinyModel().experts_per_token,
        max_context=CONTEXT,
        tied=shape.tied,
        characters=string.printable[:95] + "\n",
    )
    folder = FOLDER / f"qwen3-{shape.experts}-experts-{blake2b(repr(size).encode(), digest_size=4).hexdigest()}"
    if not (folder / "config.json").is_file():
        staging = folder.with_name(f".{folder.name}")
        write_tiny_model(staging, size)
        staging.replace(folder)
    return folder


def _two_ranks(role: str, given: dict[str, Any], first: str) -> dict[str, Any]:
    """Two ranks along the first of the role's axes that has several; experts are divided if they were."""
    axes = [axis for axis in (first, "tp", "cp", "pp", "ep") if isinstance(given.get(axis), int) and given[axis] > 1]
    axis = next((axis for axis in axes if axis != "ep"), "tp")
    changed: dict[str, Any] = {f"{role}.{name}": 1 for name in ("fsdp", "tp", "cp", "pp", "ep") if name in given}
    if axes:
        changed[f"{role}.{axis}"] = 2
        changed[f"{role}.ep"] = 2 if "ep" in axes else 1
    return changed


def _small_set(given: Any) -> Any:
    """An evaluation set of the same problems, with short answers and few of them."""
    if not isinstance(given, dict):
        return given
    sampling = given.get("sampling")
    sampling = {**(sampling if isinstance(sampling, dict) else {}), "max_tokens": ANSWER_TOKENS}
    return given | {"samples_per_prompt": 2, "pass_at": [], "sampling": sampling}


def _of(values: dict[str, Any], section: str, key: str) -> Any:
    found = values.get(section)
    return found.get(key) if isinstance(found, dict) else None
