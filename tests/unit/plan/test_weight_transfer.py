"""An update on paper: bytes and times worked out by hand, and the planner's speed on the largest model."""

import json
from pathlib import Path

import pytest
import torch

from goaly.models.catalog import MODELS
from goaly.models.families.llama3 import Llama3
from goaly.plan import weight_transfer
from goaly.plan.parallelism import Parallelism
from goaly.plan.weight_transfer import Network, Update, main, plan_transfer
from goaly.weights.buckets import cut, needs_of
from goaly.weights.reshard_plan import plan, share

NETWORK = Network(ranks_per_host=2, nic_gbps=8.0, memory_gbps=80.0)
TINY = Llama3(layers=1, dim=8, hidden_dim=16, heads=2, kv_heads=1, head_dim=4, vocab_size=32, max_context=64)
"""In elements: embedding and head 256 each, wqkv and wo 128 and 64, w1 to w3 128 each, three norms of 8: 1112."""


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(weight_transfer.MODELS, "tiny", TINY)


def update(trainer: Parallelism, generator: Parallelism, network: Network = NETWORK, model: str = "tiny") -> Update:
    return plan_transfer(model, trainer, generator, network, "bfloat16")


def test_bytes_are_those_worked_out_by_hand() -> None:
    """Two trainer ranks hold half of each tensor's rows; generator rank 1 of 2, and all of the norms."""
    found = update(Parallelism(fsdp=2), Parallelism(tp=2))
    assert found.parameters == 1112
    links = {(link.trainer, link.generator): link for link in found.links}
    rows = 2 * (256 + 256 + 128 + 128 + 128) // 2  # column-parallel: rows from one trainer rank
    columns = 2 * (64 + 128) // 4  # row-parallel: half the columns of half the rows
    norms = 2 * 24 // 2
    assert {ranks: link.bytes for ranks, link in links.items()} == {
        (0, 0): rows + columns + norms,
        (1, 0): columns + norms,
        (0, 1): columns + norms,
        (1, 1): rows + columns + norms,
    }
    assert links[0, 1].messages == 2  # one bucket of wo's and w2's columns, one of what both ranks need
    assert found.read_over_needed == 1
    assert (found.staged.total, found.received.total) == (2 * 1112, 2 * (1112 + 24))


def test_across_hosts_whole_buckets_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_transfer, "cut", lambda layout, limit, needs: cut(layout, limit))  # readers told nothing
    across = update(Parallelism(fsdp=2), Parallelism(tp=2))
    assert (across.received.total, across.read_over_needed) == (2 * 2 * 1112, 2 * 1112 / (1112 + 24))
    within = update(Parallelism(), Parallelism())
    assert (within.received.total, within.read_over_needed) == (2 * 1112, 1)


def test_replicas_each_pull_everything() -> None:
    once, twice = (update(Parallelism(fsdp=2), Parallelism(tp=2, replicas=replicas)) for replicas in (1, 2))
    assert twice.sent.total == 2 * once.sent.total
    assert twice.staged == once.staged
    assert {link.generator for link in twice.links} == {0, 1, 2, 3}


def test_time_is_the_busiest_network_cards_or_memorys() -> None:
    across = update(Parallelism(fsdp=2), Parallelism())
    assert across.slowest == "generator rank 0's network card, in"
    assert across.pull_seconds == pytest.approx(2 * 1112 * 8 / 8e9)
    within = update(Parallelism(), Parallelism())
    assert within.slowest == "generator rank 0's memory"
    assert within.pull_seconds == within.stage_seconds == pytest.approx(2 * 1112 * 8 / 80e9)
    out = update(Parallelism(), Parallelism(replicas=3), Network(ranks_per_host=1, nic_gbps=8.0, memory_gbps=80.0))
    assert out.slowest == "trainer rank 0's network card, out"
    assert out.pull_seconds == pytest.approx(3 * across.pull_seconds)


def test_hosts_are_ranks_in_a_row_trainers_first() -> None:
    found = update(Parallelism(fsdp=3), Parallelism(replicas=2))
    assert {(link.trainer, link.generator) for link in found.links if link.in_host} == {(2, 0)}


@pytest.mark.parametrize(
    ("model", "trainer", "generator"),
    [
        ("qwen3-8b", Parallelism(replicas=2, fsdp=4), Parallelism(tp=2, replicas=2)),
        ("qwen3-8b", Parallelism(replicas=3, fsdp=2, tp=2), Parallelism(tp=4)),
        ("qwen3-30b-a3b", Parallelism(replicas=2, fsdp=4, tp=2, ep=8), Parallelism(tp=4, ep=4)),
    ],
)
def test_replicated_trainers_send_within_a_tenth_of_evenly(model, trainer, generator) -> None:
    found = update(trainer, generator, model=model)
    sent = [0] * trainer.ranks
    for link in found.links:
        sent[link.trainer] += link.bytes
    replicas = [sent[rank :: trainer.fsdp * trainer.tp] for rank in range(trainer.fsdp * trainer.tp)]
    for loads in replicas:
        even = sum(loads) / len(loads)
        assert max(loads) <= 1.1 * even
        assert min(loads) >= 0.9 * even


def test_one_rank_of_the_largest_model_reads_exactly_the_bytes_it_needs() -> None:
    parameters = MODELS["qwen3-235b-a22b"].parameters()
    trainer, generator = Parallelism(fsdp=32, ep=8), Parallelism(tp=8)
    shares = share([trainer.layout(parameters, rank, torch.bfloat16) for rank in range(trainer.ranks)])
    destinations = [generator.layout(parameters, rank, torch.bfloat16) for rank in range(generator.ranks)]
    needs = [needs_of(destination) for destination in destinations]
    pieces, buckets = zip(*(cut(layout, 8 << 20, needs) for layout in shares), strict=True)
    copies = plan(pieces, destinations[3])
    assert len({copy.source for copy in copies}) == trainer.ranks
    wanted = {(copy.source, copy.source_shard) for copy in copies}
    read = [
        sum(pieces[rank][piece].bytes for piece in bucket)
        for rank, staged in enumerate(buckets)
        for bucket in staged
        if any((rank, piece) in wanted for piece in bucket)
    ]
    assert sum(read) == sum(shard.bytes for shard in destinations[3])


def test_the_command_prints_a_table_and_writes_every_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "update.json"
    main(["--model=qwen3-0.6b", "--trainer=fsdp=4", "--generator=tp=2,replicas=2", f"--json={file}"])
    written = json.loads(file.read_text())
    assert len(written["links"]) == 4 * 4
    assert sum(link["bytes"] for link in written["links"]) == written["received"]["total"]
    table = capsys.readouterr().out
    assert "qwen3-0.6b: 0.6 B parameters" in table
    assert "in-host    16 links" in table


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--trainer=fsdp=2,fsdp=2", "--generator=tp=1"], "fsdp=2: must be one of replicas, fsdp, tp, ep, once"),
        (["--trainer=pp=2", "--generator=tp=1"], "pp=2: must be one of replicas, fsdp, tp, ep, once"),
        (["--trainer=fsdp=2", "--generator=tp=3"], "--generator tp=3: must divide"),
        (["--trainer=fsdp=2", "--generator=tp=1", "--nic-gbps=0"], "--nic-gbps=0: must be above 0"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_planned(arguments, said, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["--model=qwen3-8b", *arguments])
    assert said in capsys.readouterr().err
