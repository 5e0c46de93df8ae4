"""How fetched weights become a model's."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from goaly.base.errors import WeightsError
from goaly.weights.fetched_weights import FetchedWeights, fit_on_device


class Tied(nn.Module):
    """Two layers over one matrix, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.Parameter(torch.ones(3))


def filled(model: nn.Module, published: set[str]) -> FetchedWeights:
    destination = FetchedWeights(dict(model.named_parameters(remove_duplicate=False)))
    destination.allocate(published)
    return destination


def fetch(destination: FetchedWeights, value: float) -> None:
    for target in destination.targets():
        target.fill_(value)


@pytest.mark.parametrize("published", ["embedding.weight", "head.weight"])
def test_tied_weights_are_filled_once_by_the_name_that_is_published_and_stay_tied(published: str) -> None:
    model = Tied()
    destination = filled(model, {published, "norm"})
    assert {shard.name for shard in destination.layout} == {published, "norm"}
    for version in (1.0, 2.0, 3.0):
        fetch(destination, version)
        destination.apply()
        for parameter in (model.embedding.weight, model.head.weight, model.norm):
            assert bool((parameter == version).all())
        assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
        assert bool((model.head(torch.ones(3)) == 3 * version).all())


def test_what_is_fetched_is_not_seen_before_it_is_applied() -> None:  # weights-10
    model = Tied()
    destination = filled(model, {"head.weight", "norm"})
    for version in (1.0, 2.0, 3.0):
        before = [parameter.clone() for parameter in model.parameters()]
        fetch(destination, version)
        for parameter, old in zip(model.parameters(), before, strict=True):
            assert torch.equal(parameter, old)
        destination.apply()


def test_parameters_keep_their_memory_so_a_view_of_one_sees_each_version() -> None:
    model = Tied()
    places, cached = [parameter.data_ptr() for parameter in model.parameters()], model.norm.detach()[:2]
    destination = filled(model, {"head.weight", "norm"})
    for version in (1.0, 2.0):
        fetch(destination, version)
        destination.apply()
        assert cached.tolist() == [version, version]
        assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_two_parameters_of_one_memory_are_filled_once_and_stay_tied() -> None:
    model = Tied()
    model.head.weight = nn.Parameter(model.embedding.weight.detach())
    destination = filled(model, {"head.weight", "norm"})
    fetch(destination, 4.0)
    destination.apply()
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
    assert bool((model.embedding.weight == 4).all())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU goes on after `apply`")
def test_spares_are_not_written_before_the_gpu_is_done_with_them() -> None:
    parameter = nn.Parameter(torch.ones(1 << 20, device="cuda"), requires_grad=False)
    destination = FetchedWeights({"w": parameter})
    destination.allocate({"w"})
    read = torch.empty_like(parameter)
    torch.cuda._sleep(10**9)
    read.copy_(parameter)
    fetching = torch.cuda.Stream()
    with torch.cuda.stream(fetching):
        fetch(destination, 2.0)
    fetching.synchronize()
    destination.apply()
    destination.settle()
    with torch.cuda.stream(fetching):
        fetch(destination, 3.0)
    torch.cuda.synchronize()
    assert bool((read == 1).all())
    assert bool((parameter == 2).all())


def test_a_parameter_that_is_not_what_was_said_of_it_is_refused() -> None:  # weights-11
    live = {"w": nn.Parameter(torch.zeros(10, 4))}
    destination = FetchedWeights({"w": torch.zeros(8, 4)}, live)
    with pytest.raises(WeightsError, match=r"`w` has shape \(10, 4\) here, which the layout doesn't cover once"):
        destination.allocate({"w"})


def test_spares_on_the_host_hold_what_is_applied():
    shared = torch.zeros(4, 2)
    destination = FetchedWeights({"a": shared, "b": shared}, spare="host")
    destination.allocate({"a"})
    (target,) = destination.targets()
    target.fill_(3.0)
    assert not shared.any()
    destination.apply()
    assert torch.equal(shared, torch.full((4, 2), 3.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_spares_of_a_gpus_parameters_are_pinned_memory_of_the_host():
    live = torch.zeros(1 << 16, device="cuda")
    destination = FetchedWeights({"a": live}, spare="host")
    destination.allocate({"a"})
    (target,) = destination.targets()
    assert (target.device.type, target.is_pinned()) == ("cpu", True)
    target.fill_(3.0)
    destination.apply()
    assert bool((live == 3.0).all())


@pytest.mark.parametrize(("free", "pinned"), [(1000, False), (999, True)])
def test_spares_are_on_the_gpu_only_if_a_twentieth_of_it_stays_free(
    free: int, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, asked = [torch.zeros(100), torch.zeros(50)], []  # 600 bytes
    on_gpu = [SimpleNamespace(is_cuda=True, device="cuda:1", nbytes=one.nbytes) for one in live]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (free, 8000))
    assert fit_on_device(on_gpu) is not pinned
    assert asked == ["cuda:1"]
    assert fit_on_device(live)
    assert asked == ["cuda:1"]


def test_a_place_that_follows_from_what_fits_is_the_parameters_own_without_a_gpu() -> None:
    shared = torch.zeros(4, 2)
    destination = FetchedWeights({"a": shared}, spare="auto")
    destination.allocate({"a"})
    assert [target.device for target in destination.targets()] == [shared.device]
