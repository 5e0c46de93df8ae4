"""Four processes over gloo that have the layers of a model one after another do what one process does."""

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from goaly.train.pipeline import Pipeline, schedule, stage_of
from tests.unit.train.layouts import Compared, Layout, cases, compared

EVERYTHING = ("parts", "replayed", "rewritten", "critic", "refused")
LAYOUTS = {
    "pp": Layout({"pp": 4}, layers=5),  # with fewer microbatches than stages
    "pp-tp": Layout({"pp": 2, "tp": 2}, layers=3),
    "experts-pp-fsdp-ep": Layout(
        {"pp": 2, "fsdp": 2, "ep": 2, "activation_checkpointing": "full"}, EVERYTHING, layers=3
    ),
    "lora-experts-pp-cp": Layout(
        {"pp": 2, "cp": 2, "activation_checkpointing": "selective", "microbatch_rows": 1}, layers=3
    ),
    "bitwise-pp-fsdp": Layout({"pp": 2, "fsdp": 2}, layers=3),
    "latent-pp-fsdp-ep": Layout({"pp": 2, "fsdp": 2, "ep": 2}, ("biases",), layers=3),
    "sinks-pp-fsdp": Layout({"pp": 2, "fsdp": 2}, layers=2),
}


@pytest.fixture(scope="module")
def stages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return compared(request, tmp_path_factory.mktemp("out"), LAYOUTS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "what"), cases(LAYOUTS, first_lane=("pp", "experts-pp-fsdp-ep")))
def test_stages_have_what_one_rank_has(stages: Compared, name: str, what: str):  # train-1
    stages.check(name, what)


@pytest.mark.parametrize("layers", range(1, 12))
def test_stages_have_each_layer_once_and_about_as_many(layers: int):
    for count in range(1, layers + 1):
        stages = [stage_of(layers, count, number) for number in range(count)]
        assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
        weights = [len(stage.layers) + stage.is_first + stage.is_last for stage in stages]
        assert min(len(stage.layers) for stage in stages) >= 1
        assert max(weights) - min(weights) <= (1 if layers + 2 >= 2 * count else 2)


SHAPES = [(stages, microbatches) for stages in range(1, 6) for microbatches in range(1, 8)]


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_a_stage_makes_each_pass_once_and_holds_no_more_microbatches_than_stages_follow(stages: int, microbatches: int):
    for number in range(stages):
        order = schedule(stage_of(stages, stages, number), microbatches, trains=True)
        held: set[int] = set()
        for microbatch, is_backward in order:
            held ^= {microbatch}
            assert is_backward == (microbatch not in held)
            assert len(held) <= stages - number
        assert len(order) == 2 * microbatches
        assert not held


class Recording(Pipeline):
    """A stage that notes what it would send and receive at once."""

    def _exchange(self, sent: Any, batch: Any = None, source: int = -1) -> torch.Tensor | None:
        receives = batch is not None and 0 <= source < self.stage.count
        self.noted.append((None if sent is None else sent.to, source if receives else None))
        return torch.ones(1) if receives else None


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_no_stage_waits_for_ever_even_if_a_message_is_sent_only_once_it_is_received(
    stages: int, microbatches: int, trains: bool
):  # train-8
    exchanges: list[deque[list[tuple[str, int]]]] = []
    for number in range(stages):
        pipeline = Recording(stage_of(stages, stages, number))
        pipeline.noted = []
        for each in pipeline.passes([SimpleNamespace()] * microbatches, lambda rows: rows, trains=trains):
            if each.is_backward:
                each.output.backward(each.gradient)
            else:
                each.output = torch.ones(1, requires_grad=trains) * (1 if each.arrived is None else each.arrived)
        exchanges.append(
            deque(
                [(kind, peer) for kind, peer in zip(("send", "receive"), noted, strict=True) if peer is not None]
                for noted in pipeline.noted
                if noted != (None, None)
            )
        )

    def matches() -> Iterator[tuple[int, int]]:
        for rank, waiting in enumerate(exchanges):
            for kind, peer in waiting[0] if waiting else ():
                if kind == "send" and exchanges[peer] and ("receive", rank) in exchanges[peer][0]:
                    yield rank, peer

    messages = (stages - 1) * microbatches * (2 if trains else 1)
    for _ in range(messages):
        sender, receiver = next(matches())
        exchanges[sender][0].remove(("send", receiver))
        exchanges[receiver][0].remove(("receive", sender))
        for rank in (sender, receiver):
            if not exchanges[rank][0]:
                exchanges[rank].popleft()
    assert not any(exchanges)
