"""The supervised app, for a few steps of a very small model: resuming, doing nothing twice, errors, several ranks."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file

from apps.sft.config import SftConfig
from apps.sft.folder import MARK, SftFolder
from apps.sft.main import main
from goaly.base.config import Loaded
from goaly.base.errors import ConfigError
from goaly.base.telemetry.settings import TelemetrySettings
from goaly.models.tiny_model import TinyModel
from goaly.prompts.settings import ArithmeticSettings, SupervisedSettings
from goaly.run.rendezvous import lasting_port
from goaly.train.settings import OptimizerSettings, TrainerSettings

TINY = TinyModel(dim=16, layers=1, heads=2, kv_heads=2, head_dim=8, hidden_dim=32, max_context=128)


def config(output: Path, **changes: object) -> SftConfig:
    """Six steps of a very small model on additions."""
    settings: dict[str, object] = {
        "output": str(output),
        "steps": 6,
        "tiny": TINY,
        "data": SupervisedSettings(
            task="arithmetic",
            arithmetic=ArithmeticSettings(min_digits=1, max_digits=3),
            row_length=64,
            rows_per_step=2,
        ),
        "trainer": TrainerSettings(optimizer=OptimizerSettings(lr=3e-3)),
        "telemetry": TelemetrySettings(progress="off", tensorboard=False),
    }
    return SftConfig(**(settings | changes))


def run(settings: SftConfig) -> int:
    """The app, in this process."""
    return main(Loaded(config=settings, dry_run=False, path=None))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """What a folder's model weighs."""
    return load_file(folder / "model.safetensors")


def losses(folder: Path) -> list[float]:
    """The loss of every step of a run."""
    lines = (folder.with_name(f"{folder.name}.run") / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder of the app, trained without interruption."""
    output = tmp_path_factory.mktemp("sft") / "model"
    assert run(config(output)) == 0
    return output


@pytest.mark.timeout(400)  # imports torchtitan and transformers
def test_training_lowers_the_loss_and_leaves_a_folder_that_transformers_loads(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    curve = losses(trained)
    assert len(curve) == 6
    assert curve[-1] < curve[0]
    model = AutoModelForCausalLM.from_pretrained(trained)
    asked = AutoTokenizer.from_pretrained(trained)("1+2=", return_tensors="pt")
    assert model.generate(**asked, max_new_tokens=3).shape[1] == 7


def test_a_second_call_with_the_same_config_does_nothing(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (trained / "model.safetensors").stat().st_mtime_ns
    assert run(config(trained)) == 0
    assert (trained / "model.safetensors").stat().st_mtime_ns == before
    assert "is there already" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_to_bit_identical_parameters(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path / "model", checkpoint_every=2)
    save = SftFolder.save_checkpoint

    def interrupted(folder: SftFolder, state: dict[str, object]) -> None:
        save(folder, state)
        if state["engine"]["steps_done"] == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SftFolder, "save_checkpoint", interrupted)
        assert run(settings) == 130
    assert not (tmp_path / "model" / MARK).exists()
    assert run(settings) == 0
    expected = weights(trained)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "model").items())
    assert losses(tmp_path / "model") == losses(trained)


def test_a_changed_config_trains_anew(tmp_path: Path) -> None:
    assert run(config(tmp_path / "model", steps=1)) == 0
    first = weights(tmp_path / "model")
    assert run(config(tmp_path / "model", steps=2)) == 0
    assert any(not torch.equal(tensor, first[name]) for name, tensor in weights(tmp_path / "model").items())
    assert len(losses(tmp_path / "model")) == 2


def test_a_folder_of_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something that no supervised run made"):
        run(config(tmp_path / "model"))


def as_torchrun_starts_it(rank: int, port: int, arguments: list[str]) -> None:
    """`python -m apps.sft.main` as one of two ranks."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    sys.argv = ["apps.sft.main", *arguments]
    runpy.run_module("apps.sft.main", run_name="__main__", alter_sys=True)


@pytest.mark.timeout(400)  # the first that needs it waits for torchtitan and vLLM
def test_two_ranks_train_what_one_trains(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "model"
    overrides = [
        f"output={output}",
        "steps=6",
        *(
            f"tiny.{name}={value}"
            for name, value in vars(TINY).items()
            if name not in ("seed", "tied", "rope_theta", "characters")
        ),
        "data.task=arithmetic",
        "data.arithmetic.min_digits=1",
        "data.arithmetic.max_digits=3",
        "data.row_length=64",
        "data.rows_per_step=2",
        "trainer.fsdp=2",
        "trainer.optimizer.lr=0.003",
        "telemetry.progress=off",
        "telemetry.tensorboard=false",
    ]
    torch.multiprocessing.start_processes(
        as_torchrun_starts_it, (lasting_port(), overrides), nprocs=2, start_method="forkserver"
    )
    expected = weights(trained)
    for name, tensor in weights(output).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4)


def test_settings_that_cannot_work_together_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^SftConfig\.steps=0: must be at least 1$"):
        config(tmp_path, steps=0)
    broken = config(tmp_path, tiny=None, trainer=TrainerSettings(fsdp=3, minibatches=2), checkpoint_every=5)
    assert broken.problems("") == [
        "model: set it, or tiny, and not both",
        "data.rows_per_step=2: must be a multiple of trainer.fsdp=3",
        "trainer.minibatches=2: must be 1 in a supervised run; data.rows_per_step is the size of a step",
        "checkpoint_every=5: must be 0 with several ranks",
    ]
    experts = config(tmp_path, tiny=TinyModel(experts=6, layers=1), trainer=TrainerSettings(fsdp=2, ep=2, tp=1))
    assert experts.problems("") == []
    uneven = config(tmp_path, tiny=TinyModel(experts=7, layers=1), trainer=TrainerSettings(fsdp=2, ep=2))
    assert uneven.problems("") == ["trainer.ep=2: must divide the tiny model's 7 experts"]
    idle = config(tmp_path, trainer=TrainerSettings(expert_balance=0.1))
    assert idle.problems("") == ["trainer.expert_balance=0.1: has no effect, the model has no experts"]
