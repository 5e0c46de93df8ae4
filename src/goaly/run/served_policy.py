"""The policy that generators outside of a run serve: a model folder, or the newest one of a run.

While the run is under way its generators' weights come from its weight store, from the newest version on. Otherwise
they are those of the policy that it saved last.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goaly.base.config import RUN_CONFIG
from goaly.base.errors import ConfigError, RunFailed
from goaly.models.settings import ADAPTER_CONFIG, LoraSettings, ModelSettings, no_model
from goaly.prompts.settings import ChatSettings
from goaly.run.offered_store import StoreFile
from goaly.weights.settings import WeightSettings

if TYPE_CHECKING:
    from goaly.weights.store import WeightStore

SAVED = ("policy", "policies/*")
"""The folders in a run's folder that may hold a saved policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunModel:
    """The parts of a run's config that describe its policy."""

    model: ModelSettings
    """The model that training started from."""
    weights: WeightSettings
    lora: LoraSettings | None
    chat: ChatSettings

    @classmethod
    def of(cls, run_dir: Path) -> "RunModel":
        """Those of the run in this folder; ConfigError if it has no config."""
        from omegaconf import OmegaConf

        from goaly.base.config.check import check

        if not (run_dir / RUN_CONFIG).is_file():
            raise ConfigError([f"run={run_dir}: has no {RUN_CONFIG}, must be the folder of a run"])
        values: Any = OmegaConf.to_container(OmegaConf.load(run_dir / RUN_CONFIG), resolve=True)
        read: dict[str, Any] = {"lora": None}
        problems = []
        for name, schema in (("model", ModelSettings), ("weights", WeightSettings), ("chat", ChatSettings)):
            read[name], found = check(schema, values.get(name) or {}, name)
            problems += found
        if lora := (values.get("trainer") or {}).get("lora"):
            read["lora"], found = check(LoraSettings, lora, "trainer.lora")
            problems += found
        if not problems and read["weights"].transport == "torchstore":
            problems.append(
                "weights.transport=torchstore: must be another, which processes outside of the run can read"
            )
        if problems:
            raise ConfigError([f"run={run_dir}: {problem}" for problem in problems])
        return cls(**read)


class ServedPolicy:
    """Finds the policy that a generator starts with, and whether it is to follow a run."""

    def __init__(self, model: ModelSettings, run_dir: Path | None = None):
        """Without a run the policy is `model`, whose path then needs not be that of a run's model."""
        self._model = model
        self._run_dir = run_dir
        self._run = None if run_dir is None else RunModel.of(run_dir)
        self._file = None if run_dir is None else StoreFile(run_dir)

    def store(self) -> "WeightStore | None":
        """The weight store of the run, if it is under way: the same object until another one takes its place."""
        return None if self._file is None else self._file.read()

    def followed(self) -> tuple[ModelSettings, WeightSettings, LoraSettings | None]:
        """The model that a generator that follows the run begins with, and how it gets newer weights."""
        assert self._run is not None
        return self._run.model, self._run.weights, self._run.lora

    def at_rest(self) -> ModelSettings:
        """The policy when no run is under way; RunFailed if there is none, or if the newest one is adapters only."""
        if self._run_dir is None:
            return self._model
        folders = [folder for each in SAVED for folder in self._run_dir.glob(each)]
        found = [folder / name for folder in folders for name in ("config.json", ADAPTER_CONFIG)]
        whole = [file for file in found if file.is_file() and not file.parent.name.startswith(".")]
        if not whole:
            raise RunFailed(f"run={self._run_dir}: is not under way, and has saved no policy")
        newest = max(whole, key=lambda file: file.stat().st_mtime)
        if newest.name == ADAPTER_CONFIG:
            raise RunFailed(f"{no_model(newest.parent, f'run={self._run_dir}')}, which can be served as path=OUTPUT")
        return replace(self._model, path=str(newest.parent))
