"""`python -m goaly.parity` names the operation that is broken on purpose, on either side."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import goaly.parity
import goaly.parity_search
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.run.rendezvous import in_ranks

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]


def lowest(scores_BLE: torch.Tensor, count: int) -> torch.Tensor:
    """The numbers of the lowest scores, in order."""
    return scores_BLE.sort(dim=-1, stable=True).indices[..., :count].sort(dim=-1).values


def break_module(model: Any, operation: str, *, by_length: bool = False, most: int | None = None) -> None:
    """Let this module's output be a little too large: always, by the number of tokens that it computes, or if these are
    at most so `most`."""
    module = model.get_submodule(operation)
    plain = module.forward

    def broken(x: Any, *rest: Any) -> Any:
        outputs = plain(x, *rest)
        if most is not None and x.shape[1] > most:
            return outputs
        factor = 1 + 1e-4 * (x.shape[1] if by_length else 1)
        return tuple(one * factor for one in outputs) if isinstance(outputs, tuple) else outputs * factor

    module.forward = broken


def with_broken(rank: int, side: str, operation: str, work: Callable[..., None], *arguments: Any) -> None:
    """Do the work of a rank where an operation is broken: of a `trainer`, only of the last of several ranks of one
    (`rank`), or of a `sampler` in passes of few tokens. With `choices` the sampler of the check, but not that of the
    search, chooses other experts than any trainer would."""
    from goaly.generate.vllm_model import TorchtitanForCausalLM
    from goaly.numerics import bitwise_experts
    from goaly.train.train_engine import TrainEngine

    if side == "choices":
        if work is goaly.parity._sample:
            bitwise_experts.highest = lowest
        return work(rank, *arguments)
    builder: Any = TorchtitanForCausalLM if side == "sampler" else TrainEngine
    build = builder.__init__

    @functools.wraps(build)
    def build_broken(self: Any, *given: Any, **named: Any) -> None:
        build(self, *given, **named)
        if side == "sampler":
            break_module(self.model, operation, most=8)  # to which vLLM pads one
        elif side == "trainer":
            break_module(self.decoder, operation, by_length=True)
        elif given[1].ranks > 1 and rank == given[1].ranks - 1:
            break_module(self.decoder, operation)

    builder.__init__ = build_broken
    work(rank, *arguments)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command with a broken operation; its exit code and what it prints."""

    def run(side: str, operation: str, *overrides: str, experts: bool = False) -> tuple[int, str]:
        of_experts = {"experts": 6, "experts_per_token": 3, "hidden_dim": 64} if experts else {}
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
            monkeypatch.setattr(goaly.parity_search, "in_ranks", in_broken_ranks)
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
    assert "No operation before lm_head computes other bits" in said


@pytest.mark.parametrize(
    ("side", "operation", "ranks", "experts", "where"),
    [
        (
            "trainer",
            "layers.1.attention.wo",
            "trainer.tp=1",
            False,
            "trainer rank 0, which computes it among packed rows",
        ),
        (
            "rank",
            "layers.0.moe.routed_experts.inner_experts",
            "trainer.tp=2",
            True,
            "trainer rank 1, which computes it among",
        ),
        (
            "sampler",
            "layers.1.attention.wo",
            "generator.tp=2",
            False,
            "sampler rank 0, which computes it a token at a time",
        ),
    ],
)
def test_the_first_operation_that_is_not_that_of_one_rank_alone_is_named_with_its_side(
    check: Any, side: str, operation: str, ranks: str, experts: bool, where: str
):
    code, said = check(side, operation, ranks, experts=experts)
    assert code == 1
    assert "the trainer's log-prob is -" in said
    assert f"The first operation whose output on {where}" in said
    assert f"is not that of the one rank is {operation}." in said


def test_a_head_of_one_rank_that_computes_other_bits_leaves_no_operation_before_it(check: Any):
    code, said = check("rank", "lm_head", "trainer.fsdp=2")
    assert code == 1
    assert "No operation before lm_head computes other bits: it is lm_head" in said
