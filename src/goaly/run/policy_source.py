"""The policy that a server of a policy serves: a model folder, or the newest one of a run.

While the run is under way, the weights of the server's generators come from the run's weight store, from the newest
version on. The file `store.handle` in the run's folder names the store that the trainer publishes to. The trainer does
not wait for these readers, and what they hold is free once their process ends. A file that the end of a controller left
behind names no store. When no run is under way, the policy is the one that the run saved last.
"""

import logging
import pickle
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from goaly.base.atomic_files import put_file
from goaly.base.config import RUN_CONFIG
from goaly.base.errors import ConfigError, RunFailed
from goaly.base.process import ProcessMark, is_running, this_process
from goaly.models.settings import ADAPTER_CONFIG, LoraSettings, ModelSettings, no_model
from goaly.prompts.settings import ChatSettings
from goaly.weights.settings import WeightSettings

if TYPE_CHECKING:
    from goaly.weights.store import WeightStore

logger = logging.getLogger(__name__)

STORE_FILE = "store.handle"
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


class PolicySource:
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
            raise RunFailed(f"run={self._run_dir}: must be a run under way, or one that has saved a policy")
        newest = max(whole, key=lambda file: file.stat().st_mtime)
        if newest.name == ADAPTER_CONFIG:
            raise RunFailed(f"{no_model(newest.parent, f'run={self._run_dir}')}, which can be served as path=OUTPUT")
        return replace(self._model, path=str(newest.parent))


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedStore:
    """A store, and the controller of its run."""

    store: "WeightStore"
    controller: ProcessMark


def offer(run_dir: Path, store: "WeightStore") -> None:
    """Let processes of this machine read from this store, which may replace another one."""
    offered = OfferedStore(store=store, controller=this_process())
    try:
        put_file(run_dir / STORE_FILE, cloudpickle.dumps(offered))
    except OSError as error:  # the disk is full
        logger.warning("%s cannot be written, the run cannot be followed: %s", run_dir / STORE_FILE, error)


def withdraw(run_dir: Path) -> None:
    """Offer no store any more."""
    with suppress(OSError):  # the end of the controller withdraws it, too
        (run_dir / STORE_FILE).unlink(missing_ok=True)


class StoreFile:
    """The store that a run's folder names."""

    def __init__(self, run_dir: Path):
        self._path = run_dir / STORE_FILE
        self._content = b""
        self._offered: OfferedStore | None = None

    def read(self) -> "WeightStore | None":
        """The store of the run under way, the same object until another one takes its place; None if there is none."""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        if content != self._content:
            self._content, self._offered = content, pickle.loads(content)
        assert self._offered is not None
        return self._offered.store if is_running(self._offered.controller) else None
