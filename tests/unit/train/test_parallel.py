"""Two processes over gloo, sharded by FSDP2, tensor and context parallelism, do what one process does."""

from typing import Any

import pytest
import torch

from goaly.train.parallel_model import _layout
from goaly.train.rank_thread import join_process_group
from tests.unit.train.layouts import SETTINGS, Compared, Layout, cases, compared

LAYOUTS = {
    "fsdp": Layout({"fsdp": 2}, ("parts", "rewritten", "critic")),
    "tp": Layout({"tp": 2}, ("parts", "rewritten", "critic")),
    "bitwise-fsdp": Layout({"fsdp": 2}, ("critic",)),
    "bitwise-tp": Layout({"tp": 2}, ("rewritten",)),
    "experts-fsdp": Layout({"fsdp": 2}),
    "experts-tp": Layout({"tp": 2}, ("replayed",)),
    "experts-fsdp-ep": Layout({"fsdp": 2, "ep": 2}, ("parts", "replayed", "rewritten")),
    "experts-tp-ep": Layout({"tp": 2, "ep": 2}, ("replayed", "critic")),
    "bitwise-experts-tp": Layout({"tp": 2}),
    "bitwise-experts-tp-ep": Layout({"tp": 2, "ep": 2}),
    "latent-tp": Layout({"tp": 2}, ("rewritten",)),
    "latent-fsdp-ep": Layout({"fsdp": 2, "ep": 2}, ("critic",)),
    "shared-experts-tp": Layout({"tp": 2}, ("replayed",)),
    "shared-experts-fsdp-ep": Layout({"fsdp": 2, "ep": 2}),
    "sinks-tp": Layout({"tp": 2}),
    "sinks-fsdp-ep": Layout({"fsdp": 2, "ep": 2}),
    "lora-fsdp": Layout({"fsdp": 2}, ("parts",)),
    "lora-tp": Layout({"tp": 2}),
    "lora-experts-fsdp": Layout({"fsdp": 2}),
    "lora-experts-tp": Layout({"tp": 2}),
    "lora-experts-fsdp-ep": Layout({"fsdp": 2, "ep": 2}),
    "lora-experts-tp-ep": Layout({"tp": 2, "ep": 2}, ("replayed",)),
    "cp": Layout({"cp": 2}, ("parts", "rewritten", "critic")),
    "experts-cp": Layout({"cp": 2}, ("replayed",)),
    "latent-cp": Layout({"cp": 2}),
    "sinks-cp": Layout({"cp": 2}),
}
"""A further property has layouts of every way in which it depends on them."""


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return compared(request, tmp_path_factory.mktemp("out"), LAYOUTS)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "what"), cases(LAYOUTS, first_lane=("fsdp", "tp", "experts-fsdp-ep", "experts-cp")))
def test_two_ranks_have_what_one_has(two_ranks: Compared, name: str, what: str):  # train-1
    two_ranks.check(name, what)


@pytest.mark.parametrize(("gpu", "backends"), [(True, "cpu:gloo,cuda:nccl"), (False, "gloo")])
def test_a_rank_that_is_alone_communicates_by_the_same_backends_as_one_among_others(gpu, backends, monkeypatch):
    class Met(Exception):
        pass

    def meet(backend: str, **_: Any) -> None:
        raise Met(backend)

    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("goaly.models.device.use_local_device", lambda: None)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.distributed, "init_process_group", meet)
    for meeting in (lambda: _layout(SETTINGS), lambda: join_process_group(threads=1, ranks=2)):
        with pytest.raises(Met, match=f"^{backends}$"):
            meeting()
