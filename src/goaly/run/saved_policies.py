"""The policies that a run keeps as Hugging Face folders beside its final one.

    policies/000120   a periodic one (`save.every`), named by its policy version
    policies/best     the one with the best pass@1 (`save.best`), with its score in `policy_score.json`

The score of a policy is known when its evaluation ends, and training has changed the trainer's weights by then. So a
candidate for the best policy is saved when its evaluation starts, and kept or removed when its score is known.

A folder with one of these names is whole. Anything else has a hidden name, and is removed at the end or at the next
start. A policy that cannot be saved causes a warning, and never ends the run.
"""

import asyncio
import json
import logging
import os
import shutil
from pathlib import Path

from goaly.base.atomic_files import put_in_place, remove
from goaly.base.errors import first_error
from goaly.plan.run_config import SaveSettings
from goaly.rollout.evaluation import Evaluation
from goaly.run.trainer_stage import TrainerStage

logger = logging.getLogger(__name__)

BEST = "best"
CANDIDATE = ".candidate"
SCORE_FILE = "policy_score.json"


class SavedPolicies:
    """Saves the policies of a run and removes those that it no longer keeps."""

    def __init__(self, folder: Path, settings: SaveSettings, judged_by: str):
        """pass@1 on the evaluation set `judged_by` decides which policy is the best."""
        self._folder = folder
        self._settings = settings
        self._judged_by = judged_by
        self._candidate: int | None = None
        self.close()
        self._best_score = _score_in(folder / BEST)

    async def save(self, policy_version: int, trainer: TrainerStage, *, candidate: bool) -> None:
        """Save this version if it is a periodic one. `candidate`: also set it aside, until `scored`."""
        periodic = self._settings.every is not None and policy_version % self._settings.every == 0
        periodic = periodic and not (self._folder / f"{policy_version:06d}").exists()  # from before the run was resumed
        candidate = candidate and self._settings.best
        if not periodic and not candidate:
            return
        folder = self._folder / (f"{policy_version:06d}" if periodic else CANDIDATE)
        try:
            await trainer.save_version(policy_version, folder)
            if periodic:
                await asyncio.to_thread(self._saved_periodic, folder, candidate)
            if candidate:
                self._candidate = policy_version
        except Exception as error:  # a policy that cannot be saved never ends the run
            logger.warning("saving policy version %d in %s failed: %s", policy_version, folder, first_error(error))

    async def scored(self, evaluation: Evaluation) -> None:
        """Make the candidate the best policy if this evaluation of it has the highest score so far; else remove it."""
        if self._candidate != evaluation.policy_version:
            return  # it could not be saved
        self._candidate = None
        try:
            await asyncio.to_thread(self._keep_or_remove_candidate, evaluation)
        except OSError as error:
            logger.warning("keeping policy version %d as the best failed: %s", evaluation.policy_version, error)

    def close(self) -> None:
        """Remove what is not a whole policy, or not wanted."""
        for leftover in self._folder.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _saved_periodic(self, folder: Path, candidate: bool) -> None:
        if candidate:
            shutil.rmtree(self._folder / CANDIDATE, ignore_errors=True)
            shutil.copytree(folder, self._folder / CANDIDATE, copy_function=_link)
        if self._settings.keep is not None:
            periodic = sorted(
                (path for path in self._folder.iterdir() if path.name.isdigit()), key=lambda p: int(p.name)
            )
            for old in periodic[: -self._settings.keep]:
                remove(old)

    def _keep_or_remove_candidate(self, evaluation: Evaluation) -> None:
        candidate, best = self._folder / CANDIDATE, self._folder / BEST
        judged = evaluation.results.get(self._judged_by)
        score = None if judged is None else judged.pass_at_1  # an evaluation may have failed
        try:
            if score is not None and (self._best_score is None or score > self._best_score):
                facts = {"policy_version": evaluation.policy_version, "set": self._judged_by, "pass@1": score}
                (candidate / SCORE_FILE).write_text(json.dumps(facts, indent=2) + "\n")
                put_in_place(candidate, best)
                self._best_score = score
        finally:
            shutil.rmtree(candidate, ignore_errors=True)


def _score_in(folder: Path) -> float | None:
    """The score of the best policy that an earlier start of this run kept."""
    try:
        return float(json.loads((folder / SCORE_FILE).read_text())["pass@1"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s: the score of the best policy cannot be read, the next one replaces it: %s", folder, error)
        return None


def _link(source: str, target: str) -> str:
    """A second name for a file that never changes; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target
