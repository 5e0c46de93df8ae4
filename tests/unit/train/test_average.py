"""The moving average of a reference against written-out NumPy."""

import numpy as np
import torch

from goaly.train.average import Average
from goaly.train.settings import ReferenceSettings


def test_the_average_is_that_of_all_weights_that_were_taken():
    live = torch.tensor([1.0, 2.0])
    average = Average({"weight": live}, 0.75)
    expected = live.numpy().copy()
    for taken in ([3.0, 2.0], [-1.0, 0.5], [0.0, 0.0]):
        live.copy_(torch.tensor(taken))  # as an update of the weights does
        average.take()
        expected = 0.75 * expected + 0.25 * np.array(taken)
        np.testing.assert_allclose(live.numpy(), expected, rtol=1e-6)


def test_an_average_of_bfloat16_weights_moves_by_less_than_they_can_show():
    live = torch.ones(1, dtype=torch.bfloat16)
    average = Average({"weight": live}, 0.999)
    for _ in range(100):
        live.fill_(2.0)
        average.take()
    assert abs(live.item() - (2 - 0.999**100)) < 0.01  # bfloat16 alone would stay at 1


def test_an_average_without_copies_of_the_policy_is_refused():
    settings = ReferenceSettings(average=0.9)
    (problem,) = settings.problems("reference.")
    assert problem == "reference.average=0.9: has no effect, reference.refresh_every is null"
    assert ReferenceSettings(average=0.9, refresh_every=2).problems("reference.") == []
