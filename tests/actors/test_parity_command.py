"""`python -m goaly.parity` names the operation that is broken on purpose, on one rank or on many."""

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import goaly.parity
from goaly.models.tiny import TinyModel, write_tiny_model
from goaly.run.ranks import in_ranks
from tests.actors.broken_sampler import break_module

pytestmark = pytest.mark.timeout(200)


def lowest(scores_BLE: torch.Tensor, count: int) -> torch.Tensor:
    """The numbers of the lowest scores, in order."""
    return scores_BLE.sort(dim=-1, stable=True).indices[..., :count].sort(dim=-1).values


def with_broken(rank: int, side: str, operation: str, work: Callable[..., None], *arguments: Any) -> None:
    """Do the work of a rank where an operation is broken: of a `trainer`, or only of the last of several ranks of one
    (`rank`). With `choices` the sampler chooses other experts than any trainer would."""
    from goaly.generate import sampler_search
    from goaly.models import bitwise_experts
    from goaly.train.engine import TrainEngine

    sampler_search.PROGRAM = (sys.executable, "-c", "raise SystemExit('not searched')")
    if side == "choices":
        if work is goaly.parity._sample:
            bitwise_experts.highest = lowest
        return work(rank, *arguments)
    build = TrainEngine.__init__

    @functools.wraps(build)
    def build_broken(self: Any, *given: Any, **named: Any) -> None:
        build(self, *given, **named)
        if side == "trainer":
            break_module(self._model, operation, by_length=True)
        elif given[1].ranks > 1 and rank == given[1].ranks - 1:
            break_module(self._model, operation, by_length=False)

    TrainEngine.__init__ = build_broken
    work(rank, *arguments)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command with a broken operation; its exit code and what it prints."""

    def run(side: str, operation: str, *overrides: str, experts: bool = False) -> tuple[int, str]:
        of_experts = {"experts": 6, "experts_per_token": 3, "hidden_dim": 48} if experts else {}
        size = TinyModel(layers=2, **of_experts)
        config = {
            "steps": 1,
            "model": {"path": str(write_tiny_model(tmp_path / "model", size)), "numerics": "bitwise"},
            "prompts": {"task": "arithmetic"},
            "reward": {"verifier": "goaly.prompts.tasks.arithmetic:verify"},
            "generator": {"max_context": 128},
            "backlog": {"row_length": 256},
            "sampling": {"max_tokens": 32},
        }
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

        def in_broken_ranks(work: Any, ranks: int, arguments: tuple[Any, ...]) -> None:
            in_ranks(with_broken, ranks, (side, operation, work, *arguments))

        if side:
            monkeypatch.setattr(goaly.parity, "in_ranks", in_broken_ranks)
        code = goaly.parity.main([f"--config={tmp_path / 'config.yaml'}", "--requests=12", *overrides])
        return code, capsys.readouterr().out

    return run


def test_nothing_differs_where_nothing_is_broken(check: Any):
    code, said = check("", "")
    assert code == 0
    about, *packings = said.splitlines()
    numbers = re.fullmatch(
        r"12 answers, (\d+) of them with new weights in the middle; (\d+) preempted, (\d+) prompts in parts, (\d+) "
        "prefix hits",
        about,
    )
    assert numbers is not None
    assert min(map(int, numbers.groups())) > 0
    assert [line.split()[0] for line in packings] == ["0"] * 3


def test_choices_of_experts_are_replayed_where_the_config_says_so(check: Any):
    synchronous = "backlog.max_staleness=0"  # no update comes in the middle of an answer
    code, said = check("choices", "", synchronous, "trainer.tp=2", "moe.routing=replay", experts=True)
    about, *packings = said.splitlines()
    assert about.startswith("12 answers, 0 of them with new weights in the middle; ")
    assert about.endswith("; choices of experts were replayed")
    assert [line.split()[0] for line in packings] == ["0"] * 3
    assert code == 0
    code, said = check("choices", "", synchronous, experts=True)
    assert code == 1
    assert "the sampler had other weights" in said
    assert "The search in a sampler failed: not searched" in said


def test_an_operation_of_one_rank_that_depends_on_what_is_computed_beside_it_is_named(check: Any):  # PC-2
    code, said = check("trainer", "layers.1.attention.wo")
    assert code == 1
    assert "the trainer's log-prob is" in said
    assert "how the document is computed is layers.1.attention.wo." in said


@pytest.mark.parametrize(
    ("operation", "ranks", "experts"),
    [
        ("layers.0.moe.routed_experts.inner_experts", "trainer.tp=2", True),
        ("lm_head", "trainer.fsdp=2", False),
    ],
)
def test_an_operation_of_one_of_several_ranks_is_named(  # PC-2
    check: Any, operation: str, ranks: str, experts: bool
):
    code, said = check("rank", operation, ranks, experts=experts)
    assert code == 1
    assert "One rank of a trainer computes the sampler's bits." in said
    assert f" {operation}." in said
