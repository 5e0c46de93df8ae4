"""The digest of parameters: any one change is seen, and no sharding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goaly.weights import digest
from goaly.weights.buckets import cut
from goaly.weights.digest import Digest, digest_of
from goaly.weights.dtensor_layout import layout_of
from goaly.weights.layout import view

SHAPES = {"embedding": (11, 6), "norm": (7,), "experts": (3, 4, 5), "scale": ()}
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def tensors(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.dtype]).view(-1)


places = st.sampled_from([(name, place) for name, tensor in tensors().items() for place in range(tensor.numel())])


@given(seed=st.integers(0, 2**20), place=places, dtype=st.sampled_from(list(INTEGERS)))
def test_any_flipped_bit_changes_it(seed: int, place: tuple[str, int], dtype: torch.dtype):  # weights-7
    name, index = place
    found = tensors(seed, dtype)
    made = Digest(found)
    before, width = made.compute(), 8 * dtype.itemsize
    assert before == Digest(tensors(seed, dtype)).compute()
    for bit in range(width):
        flipped = 1 << bit if bit < width - 1 else -(1 << bit)
        bits(found[name])[index] ^= flipped
        assert made.compute() != before
        bits(found[name])[index] ^= flipped


@given(seed=st.integers(0, 2**20), one=places, other=places)
def test_two_elements_that_change_places_change_it(seed: int, one: tuple[str, int], other: tuple[str, int]):
    found = tensors(seed)
    first, second = bits(found[one[0]])[one[1]].clone(), bits(found[other[0]])[other[1]].clone()
    before = Digest(found).compute()
    bits(found[one[0]])[one[1]], bits(found[other[0]])[other[1]] = second, first
    assert (Digest(found).compute() == before) == bool(first == second)


def test_a_parameters_name_and_its_dims_change_it():
    found = tensors()
    others = [
        found | {"other": found["norm"]},
        {"norms" if name == "norm" else name: tensor for name, tensor in found.items()},
        found | {"embedding": found["embedding"].T.contiguous()},
        found | {"embedding": found["embedding"].view(6, 11)},
    ]
    assert len({Digest(tensors).compute() for tensors in (found, *others)}) == 5


@pytest.mark.parametrize("limit", [4, 20, 60])
def test_it_is_the_sum_over_any_pieces(limit: int):  # weights-7
    found = tensors()
    pieces, _ = cut(layout_of(found), limit)
    assert len(pieces) > 10
    parts = [digest_of(part, [view(found, piece) for piece in part]) for part in (pieces[::2], pieces[1::2])]
    assert f"{sum(parts) % 2**64:016x}" == Digest(found).compute()


@pytest.mark.parametrize("chunk", [1, 20, 1000])
def test_the_sum_on_a_gpu_is_that_on_a_cpu(chunk: int, monkeypatch: pytest.MonkeyPatch):  # weights-7
    monkeypatch.setattr(digest, "CHUNK", chunk)
    for dtype in INTEGERS:
        found = tensors(dtype=dtype)
        on_cpu = Digest(found).compute()
        with monkeypatch.context() as patched:  # the same operations on another device
            patched.setattr(torch.Tensor, "is_cuda", True)
            patched.setattr(digest, "gpu_of", lambda tensors: None)
            assert Digest(found).compute() == on_cpu


def test_it_reads_the_tensors_as_they_are_now_and_changes_none():
    found = tensors(dtype=torch.float64)
    made = Digest(found)
    before, kept = made.compute(), {name: tensor.clone() for name, tensor in found.items()}
    assert made.compute() == before
    assert all(torch.equal(tensor, kept[name]) for name, tensor in found.items())
    found["norm"][3] += 1
    assert made.compute() == Digest(found).compute() != before
