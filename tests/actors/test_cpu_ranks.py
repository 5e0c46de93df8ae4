"""Ranks of a replica on a CPU exchange tensors of any length through memory without a name."""

import os
from functools import reduce
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from goaly.numerics.cpu_ranks import PLACE, CpuRanks
from goaly.run.rendezvous import in_ranks

pytestmark = pytest.mark.timeout(60)

RANKS = 3
LENGTHS = (1, 7, PLACE // 2, PLACE // 2 + 1, 3 * PLACE)


def joined(rank: int) -> CpuRanks:
    dist.init_process_group("gloo")
    group = SimpleNamespace(world_size=RANKS, rank_in_group=rank, device_group=dist.group.WORLD)
    return CpuRanks(group)


def part(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


def exchange(rank: int, folder: Path) -> None:
    ranks, found = joined(rank), []
    for dtype in (torch.bfloat16, torch.float32):
        for length in LENGTHS:
            own = part(rank, length, dtype)
            whole, parts = own.new_empty(RANKS * length), [torch.empty_like(own) for _ in range(RANKS)]
            ranks.all_gather_into_tensor(whole, own)
            ranks.gather(own, parts if rank == 1 else None, dst=1)
            ranks.all_reduce(own)
            found.append((own, whole, torch.cat(parts) if rank == 1 else None))
    torch.save(found, folder / str(rank))
    dist.barrier()


def lose_one(rank: int, folder: Path) -> None:
    ranks = joined(rank)
    if rank == 1:
        for other in ranks._others:
            other.recv(1)  # so both wait for this rank, or will
        os._exit(0)
    with pytest.raises(ConnectionError):
        ranks.all_reduce(torch.ones(4))
    (folder / str(rank)).touch()


def test_all_ranks_get_the_sum_in_the_order_of_the_ranks_and_all_parts(tmp_path: Path):
    in_ranks(exchange, RANKS, (tmp_path,))
    expected = []
    for dtype in (torch.bfloat16, torch.float32):
        for length in LENGTHS:
            parts = [part(rank, length, dtype) for rank in range(RANKS)]
            expected.append((reduce(torch.add, parts), torch.cat(parts)))
    for rank in range(RANKS):
        found = torch.load(tmp_path / str(rank))
        for (total, whole, gathered), (of_all, parts) in zip(found, expected, strict=True):
            assert torch.equal(total, of_all)
            assert torch.equal(whole, parts)
            assert gathered is None if rank != 1 else torch.equal(gathered, parts)


def test_a_rank_gets_an_error_when_another_one_has_ended(tmp_path: Path):
    in_ranks(lose_one, RANKS, (tmp_path,))
    assert {file.name for file in tmp_path.iterdir()} == {"0", "2"}
