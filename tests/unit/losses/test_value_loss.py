"""The critic's loss by hand."""

import dataclasses

import pytest
import torch

from goaly.base.errors import SchemaError
from goaly.losses.value_loss import ValueLoss, explained, moments


def loss(values: list[float], old: list[float], returns: list[float], clip: float | None = None):
    columns = {"values": torch.tensor(old), "returns": torch.tensor(returns)}
    made = torch.tensor(values, requires_grad=True)
    part = ValueLoss(clip)(made, columns, 0)
    part.total.backward()
    return dataclasses.replace(part, total=part.total.detach()), made.grad.tolist()


def test_the_loss_is_half_the_squared_distance():
    part, gradient = loss([1.0, 2.0], [9.0, 9.0], [3.0, 1.0])
    assert float(part.total) == 2.5
    assert gradient == [-2, 1]


def test_a_value_gains_nothing_from_going_further_than_the_clip_towards_its_return():
    # from 0 towards 3: 1 is within reach, 2 is not (counts as 1), and -2 moved away (counts as what it is)
    part, gradient = loss([1.0, 2.0, -2.0], [0.0] * 3, [3.0] * 3, clip=1.0)
    assert float(part.total) == (4 + 4 + 25) / 2
    assert gradient == [pytest.approx(-2), 0, -5]
    assert part.mean["clip_fraction"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("clip", [None, 0.7])
def test_the_gradient_is_that_of_autograd_on_the_plain_formula(clip: float | None):
    generator = torch.Generator().manual_seed(3)
    values, old, returns = torch.randn(3, 40, generator=generator)
    part, gradient = loss(values.tolist(), old.tolist(), returns.tolist(), clip)
    made = values.double().requires_grad_()
    errors = (made - returns.double()).square()
    if clip is not None:
        near = old.double() + (made - old.double()).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - returns.double()).square())
    (errors.sum() / 2).backward()
    assert float(part.total) == pytest.approx(float(errors.detach().sum()) / 2, rel=1e-5)
    assert made.grad is not None
    assert gradient == pytest.approx(made.grad.tolist(), abs=1e-5)


def test_the_explained_variance_is_of_the_values_before_the_batch():
    def share(values: list[float], returns: list[float]) -> float:
        means = {name: float(v.mean()) for name, v in moments(torch.tensor(values), torch.tensor(returns)).items()}
        return explained(means)["explained_variance"]

    assert share([0.0, 2.0], [0.0, 2.0]) == 1
    assert share([5.0, 7.0], [0.0, 2.0]) == 1  # a constant distance is no variance
    assert share([1.0, 1.0], [0.0, 2.0]) == 0
    assert share([0.0, 1.0], [0.0, 2.0]) == 0.75
    assert share([2.0, 0.0], [0.0, 2.0]) == -3
    assert share([1.0, 2.0], [2.0, 2.0]) == 0


def test_the_explained_variance_is_around_the_mean_of_the_returns():
    # returns 1 and 5 vary by 4, the errors 0 and 2 by 1
    means = {name: float(v.mean()) for name, v in moments(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 5.0])).items()}
    assert explained(means) == {"value": 2.0, "return": 3.0, "explained_variance": 0.75}


@pytest.mark.parametrize(("variance", "share"), [(1e-12, 0.0), (1.1e-12, 0.5), (1e-6, 0.5), (0.3, 0.5)])
def test_returns_that_hardly_vary_are_explained_all_the_same_and_constant_ones_are_not(variance: float, share: float):
    means = {"return": 0.0, "return_square": variance, "error": 0.0, "error_square": variance / 2}
    assert explained(means)["explained_variance"] == pytest.approx(share)


def test_a_batch_without_returns_is_refused_by_name():
    with pytest.raises(SchemaError, match="value loss: `returns` is missing; the batch holds values"):
        ValueLoss()(torch.zeros(1), {"values": torch.zeros(1)}, 0)
