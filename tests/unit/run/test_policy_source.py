"""The policy that is served when its run is not under way."""

import os
from pathlib import Path

import pytest

from goaly.base.config import RUN_CONFIG
from goaly.base.errors import RunFailed
from goaly.models.settings import ModelSettings
from goaly.run.policy_source import PolicySource


@pytest.fixture
def served(tmp_path: Path, tiny_model_folder: Path) -> PolicySource:
    config = f"model: {{path: {tiny_model_folder}}}\ntrainer: {{lora: {{rank: 8}}}}\n"
    (tmp_path / RUN_CONFIG).write_text(config)
    return PolicySource(ModelSettings(path=str(tiny_model_folder)), tmp_path)


def saved(folder: Path, name: str, at: int) -> None:
    folder.mkdir(parents=True)
    (folder / name).write_text("{}")
    os.utime(folder / name, (at, at))


def test_the_newest_whole_model_is_served(served: PolicySource, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="must be a run under way, or one that has saved a policy"):
        served.at_rest()
    saved(tmp_path / "policies" / "000010", "config.json", at=10)
    saved(tmp_path / "policies" / "000020", "config.json", at=20)
    saved(tmp_path / "policies" / ".000030", "config.json", at=30)
    assert served.at_rest().path == str(tmp_path / "policies" / "000020")


def test_no_older_model_is_served_in_place_of_newer_adapters(served: PolicySource, tmp_path: Path) -> None:
    saved(tmp_path / "policies" / "000010", "config.json", at=10)
    saved(tmp_path / "policy", "adapter_config.json", at=20)
    with pytest.raises(RunFailed, match=r"has adapters only; python -m goaly\.models\.adapter_folder .*policy OUTPUT"):
        served.at_rest()
