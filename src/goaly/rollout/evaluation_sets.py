"""The problems of the evaluation sets, without duplicates."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from goaly.base.errors import ConfigError
from goaly.prompts.mixture import distinct_prompts
from goaly.prompts.prompt import Prompt, Split
from goaly.prompts.settings import PromptSettings
from goaly.rollout.evaluation import EvaluationSet, EvaluationSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemSet:
    """A named set and its problems."""

    name: str
    settings: EvaluationSet
    prompts: tuple[Prompt, ...]


class ProblemSets:
    """The evaluation sets of a run, read once: every evaluation asks the same problems."""

    def __init__(self, settings: EvaluationSettings, prompts: PromptSettings):
        """`prompts` are the settings of the training data. Logs a warning if a set has fewer problems than
        requested."""
        self._sets = {
            name: ProblemSet(
                name=name, settings=one, prompts=_prompts(one, f"evaluation.{settings.key(name)}", prompts)
            )
            for name, one in settings.named.items()
        }

    def chosen(self, names: Iterable[str] | None = None) -> list[ProblemSet]:
        """The sets of these names, or all of them, in their order in the settings."""
        wanted = list(self._sets if names is None else names)
        if unknown := [name for name in wanted if name not in self._sets]:
            known = ", ".join(self._sets)
            raise ValueError(f"no evaluation set is named {', '.join(unknown)}; known are {known}")
        return [one for name, one in self._sets.items() if name in wanted]


def _prompts(one: EvaluationSet, key: str, prompts: PromptSettings) -> tuple[Prompt, ...]:
    source, split = one.source(prompts)
    found = distinct_prompts(source, split, one.count)
    kind = "held-out problems" if split is Split.HELD_OUT else "problems"
    if not found:
        raise ConfigError([f"{key}prompts={one.prompts}: there are no {kind}"])
    if one.count is not None and len(found) < one.count:
        logger.warning(
            "%sprompts=%d: there are only %d different %s; each is asked once", key, one.count, len(found), kind
        )
    return tuple(replace(prompt, verifier=one.verifier) for prompt in found) if one.verifier else found
