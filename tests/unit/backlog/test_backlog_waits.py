"""The backlog's waits, batches and end, driven on a plain event loop."""

import asyncio
from dataclasses import replace

import pytest
import torch
from trajectories import grouped, sampled

from goaly.backlog.events import Dropped
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.group_statistics import RECENT_STEPS, Wait
from goaly.backlog.settings import BacklogSettings
from goaly.base.errors import RunFailed, SchemaError
from goaly.prompts.curriculum import Passes
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import Group

SETTINGS = BacklogSettings(groups_per_step=2, group_size=2, max_staleness=0, window=2, row_length=16)


def backlog(settings: BacklogSettings = SETTINGS, dp_ranks: int = 1, steps: int | None = None) -> GroupQueue:
    return GroupQueue(settings, AdvantageSettings(), dp_ranks=dp_ranks, pad_token=0, steps=steps)


def group(ticket: int, rewards: tuple[float, ...] = (0.0, 1.0), length: int = 4, version: int = 0) -> Group:
    samples = [sampled(length, index=at, reward=reward, version=version) for at, reward in enumerate(rewards)]
    return grouped(ticket, samples)


async def complete(queue: GroupQueue, **changes) -> int:
    ticket = await queue.admit()
    assert ticket is not None
    assert queue.report(group(ticket.index, version=ticket.min_version, **changes))
    return ticket.index


async def train_one(queue: GroupQueue) -> None:
    batch = await queue.next_batch()
    assert batch is not None
    queue.trained(batch.id, batch.id + 1)


async def waiting(waiter: asyncio.Task) -> bool:
    await asyncio.wait([waiter], timeout=0.02)
    return not waiter.done()


async def test_a_batch_waits_for_its_groups_and_takes_them_in_ticket_order():
    queue = backlog()
    for _ in range(2):
        await queue.admit()
    batch = asyncio.create_task(queue.next_batch())
    queue.report(group(1))
    assert await waiting(batch)
    queue.report(group(0, length=3))
    assert (await batch).sequences == 4
    rows = queue.rows(0, 0).rows
    assert rows["positions"][0].tolist() == [*range(4), *range(4), *range(3), *range(3), 0, 1]


@pytest.mark.parametrize("order", ["windowed", "completion"])
async def test_what_a_batch_waits_for_is_the_oldest_group_under_way(order):
    queue = backlog(replace(SETTINGS, max_staleness=3, order=order))
    assert queue.wait() == Wait(ticket=None, finished=0, needed=2, rejected=0, failed=0)
    for _ in range(5):
        await queue.admit()
    queue.report(group(2))
    queue.report(Dropped.failed(0, "broken"))
    queue.report(Dropped.rejected(4, "too long"))
    assert queue.wait() == Wait(ticket=1, finished=1, needed=2, rejected=1, failed=1)
    queue.report(group(1))
    assert queue.wait().ticket == 3
    await queue.next_batch()
    queue.report(group(3))
    assert (queue.wait().ticket, queue.wait().finished) == (None, 1)


async def test_batch_metrics_by_hand():
    queue = backlog(BacklogSettings(groups_per_step=2, group_size=2, max_staleness=1, window=2, row_length=16))
    await complete(queue, rewards=(0.0, 1.0))
    await complete(queue, rewards=(1.0, 1.0), length=6)
    await train_one(queue)
    for index, (rewards, length, version) in enumerate([((0.5, 0.0), 4, 1), ((1.0, 1.0), 6, 0)], start=2):
        await queue.admit()
        queue.report(group(index, rewards=rewards, length=length, version=version))
    batch = await queue.next_batch()
    assert (batch.id, batch.sequences, batch.tokens, batch.trained_tokens) == (1, 4, 20, 16)
    metrics = {key: value for key, value in batch.metrics.items() if not key.startswith(("queue/", "distribution/"))}
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.625,
            "reward/std": 0.41457809879,
            "reward/pass_rate": 0.5,
            "reward/pass_rate/test": 0.5,
            "reward/verifier_errors": 0.0,
            "agents/malformed_calls": 0.0,
            "agents/sessions_truncated": 0.0,
            "reward/verifier_timeouts": 0.0,
            "length/mean": 4.0,
            "length/max": 5.0,
            "length/truncated_share": 0.0,
            "age/mean": 10 / 16,
            "age/max": 1.0,
            "groups/without_signal": 1.0,
            "groups/no_signal_share": 0.5,
            "groups/rejected_no_signal": 0.0,
            "batch/fill": 20 / 32,
        }
    )


async def test_advantages_lie_on_trained_tokens_and_counts_are_of_the_whole_batch():
    queue = backlog(dp_ranks=2)
    await complete(queue, rewards=(0.0, 1.0))
    await complete(queue, rewards=(1.0, 1.0))
    await queue.next_batch()
    both = [queue.rows(0, rank) for rank in range(2)]
    assert [(packed.batch_trained_tokens, packed.batch_sequences) for packed in both] == [(12, 4)] * 2
    columns = [torch.cat([packed.rows[key].flatten() for packed in both]) for key in ("trained", "advantages")]
    trained, advantages = columns
    assert int(trained.sum()) == 12
    assert not advantages[~trained].any()
    assert sorted(round(value, 3) for value in advantages.tolist() if value) == [-1.0] * 3 + [1.0] * 3


async def test_a_later_stage_adds_a_column_of_the_right_kind_only():
    queue = backlog()
    await complete(queue)
    await complete(queue)
    await queue.next_batch()
    queue.annotate(0, 0, "reference_logprobs", torch.full((1, 16), -2.0))
    assert queue.rows(0, 0).rows["reference_logprobs"].unique().tolist() == [-2.0]
    with pytest.raises(SchemaError, match="can't add the column `tokens`"):
        queue.annotate(0, 0, "tokens", torch.zeros(1, 16))
    with pytest.raises(SchemaError, match=r"`values` is torch.float32 \(2, 16\), must be torch.float32 \(1, 16\)"):
        queue.annotate(0, 0, "values", torch.zeros(2, 16))


async def test_with_a_kl_term_advantages_come_with_the_last_ranks_reference_logprobs():
    settings = AdvantageSettings(name="group_mean", kl_coef=0.5)
    queue = GroupQueue(SETTINGS, settings, dp_ranks=2, pad_token=0)
    await complete(queue)
    await complete(queue, rewards=(3.0, 3.0))
    await queue.next_batch()
    # sampled at -0.5; the reference has -0.5 for the first rank's tokens, -1.5 for the second's: k1 is 0 and 1
    for rank, logprob in enumerate((-0.5, -1.5)):
        assert "advantages" not in queue.rows(0, rank).rows
        rows = queue.rows(0, rank).rows
        queue.annotate(0, rank, "reference_logprobs", logprob * rows["trained"].float())
    # each rank holds one sample of each group, of three trained tokens: the second rank's lose 0.5 * 3 = 1.5.
    # group 0: rewards 0 and 1 - 1.5, group 1: 3 and 3 - 1.5, less their means
    found = [queue.rows(0, rank).rows for rank in range(2)]
    each = [sorted(set(rows["advantages"][rows["trained"]].tolist())) for rows in found]
    assert each == [[0.25, 0.75], [-0.75, -0.25]]
    assert all((rows["advantages"][~rows["trained"]] == 0).all() for rows in found)


async def test_with_a_critic_advantages_and_returns_come_with_the_last_ranks_values():
    queue = GroupQueue(SETTINGS, AdvantageSettings(name="gae", options={"normalize": False}), dp_ranks=2, pad_token=0)
    await complete(queue)
    await complete(queue, rewards=(3.0, 3.0))
    await queue.next_batch()
    for rank in range(2):
        rows = queue.rows(0, rank).rows
        assert not {"advantages", "returns"} & set(rows.keys())
        queue.annotate(0, rank, "values", 0.5 * rows["trained"].float())
    found = [queue.rows(0, rank).rows for rank in range(2)]
    for key, of_last_token in (("advantages", [-0.5, 0.5, 2.5, 2.5]), ("returns", [0.0, 1.0, 3.0, 3.0])):
        assert all((rows[key][~rows["trained"]] == 0).all() for rows in found)
        of_samples = torch.cat([rows[key][rows["trained"]] for rows in found]).view(-1, 3)
        assert sorted(of_samples[:, -1].tolist()) == of_last_token


async def test_close_gives_every_waiter_none_and_accounts_for_what_was_queued():
    queue = backlog()
    await complete(queue)
    await queue.admit()
    waiters = [asyncio.create_task(queue.admit()), asyncio.create_task(queue.next_batch())]
    assert await waiting(waiters[0])
    queue.close()
    assert await asyncio.gather(*waiters) == [None, None]
    assert (await queue.admit(), await queue.next_batch()) == (None, None)
    assert queue.counts() == {
        "admitted": 2, "running": 1, "queued": 0, "trained": 0, "rejected": 1, "failed": 0, "policy_version": 0,
    }  # fmt: skip
    assert queue.settle()["rejected"] == 2


async def test_a_group_that_comes_after_close_is_accounted_and_not_trained():
    queue = backlog()
    for _ in range(2):
        await queue.admit()
    queue.close()
    assert queue.report(group(0)) is False
    assert queue.reasons() == {"rejected: the run ended": 1}
    assert queue.settle()["rejected"] == 2
    assert queue.report(group(1)) is False


async def test_a_batch_under_training_at_close_still_counts_as_trained():
    queue = backlog()
    await complete(queue)
    await complete(queue)
    batch = await queue.next_batch()
    queue.close()
    assert not queue.report(Dropped.failed(0, "too late"))
    queue.trained(batch.id, 1)
    assert queue.settle()["trained"] == 2


async def test_a_failure_reported_after_the_group_is_complete_changes_nothing():
    queue = backlog()
    index = await complete(queue)
    assert not queue.report(Dropped.failed(index, "its worker died"))
    assert queue.counts()["queued"] == 1


async def test_a_cancelled_waiter_takes_neither_ticket_nor_groups():  # backlog-7
    queue = backlog()
    first = asyncio.create_task(queue.next_batch())
    assert await waiting(first)
    first.cancel()
    await complete(queue)
    await complete(queue)
    second = asyncio.create_task(queue.admit())
    assert await waiting(second)
    second.cancel()
    await train_one(queue)
    await asyncio.wait([first, second])
    assert first.cancelled()
    assert second.cancelled()
    assert queue.counts()["admitted"] == 2
    assert queue.counts()["trained"] == 2


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        (group(0, rewards=(1.0,)), "prompt p0: a group of 1 samples, must be backlog.group_size=2"),
        (group(0, length=17), "trajectory p/0: 17 tokens don't fit into backlog.row_length=16"),
    ],
)
async def test_a_group_that_cannot_be_trained_is_refused_and_stays_running(broken, named):
    queue = backlog()
    await queue.admit()
    with pytest.raises(SchemaError, match=named):
        queue.report(broken)
    assert queue.counts()["running"] == 1


async def test_batches_are_trained_in_their_order_by_their_version():  # backlog-6
    queue = backlog(BacklogSettings(groups_per_step=1, group_size=2, max_staleness=2, row_length=16))
    for _ in range(2):
        await complete(queue)
        await queue.next_batch()
    with pytest.raises(
        ValueError, match="batch 1 made policy_version=2; at version 0 batch 0 is next and makes version 1"
    ):
        queue.trained(1, 2)
    with pytest.raises(ValueError, match="batch 0 made policy_version=3"):
        queue.trained(0, 3)
    queue.trained(0, 1)
    with pytest.raises(ValueError, match="unknown batch 0; open batches: 1"):
        queue.rows(0, 0)
    with pytest.raises(ValueError, match="dp_rank=1: must be from 0 to 0"):
        queue.rows(1, 1)


async def test_a_group_of_weights_older_than_its_ticket_allows_is_refused():
    queue = backlog()
    for _ in range(2):
        await complete(queue)
    await train_one(queue)
    ticket = await queue.admit()
    with pytest.raises(SchemaError, match="a token of policy version 0, ticket 2 allows 1 and newer"):
        queue.report(group(ticket.index, version=0))


async def test_tokens_of_the_version_that_a_trainer_went_back_to_count_as_its_own():
    queue = backlog()
    for _ in range(2):
        await complete(queue)
    await train_one(queue)
    queue.same_weights = {0: 1}
    ticket = await queue.admit()
    assert queue.report(group(ticket.index, version=0))


async def test_the_first_group_of_a_ticket_counts_and_another_one_changes_nothing():
    queue = backlog()
    await queue.admit()
    first = group(0, rewards=(1.0, 0.0))
    assert queue.report(first)
    counts = queue.counts()
    assert not queue.report(group(0, rewards=(0.0, 1.0)))
    assert queue.counts() == counts
    assert queue._groups[0] is first
    with pytest.raises(ValueError, match="ticket 1 was never admitted"):
        queue.report(group(1))


DYNAMIC = replace(SETTINGS, dynamic_sampling=True, max_no_signal_share=0.5)


async def test_dynamic_sampling_rejects_a_group_without_signal_and_lets_another_start():
    queue = backlog(DYNAMIC)
    for _ in range(2):
        await queue.admit()
    third = asyncio.create_task(queue.admit())
    assert await waiting(third)
    assert queue.report(group(0, rewards=(1.0, 1.0))) is False
    assert queue.report(group(1)) is True
    assert (await third).min_version == 0
    assert queue.reasons() == {"rejected: no_signal": 1}
    queue.report(group(2))
    batch = await queue.next_batch()
    assert (batch.metrics["groups/rejected_no_signal"], batch.metrics["groups/without_signal"]) == (1.0, 0.0)
    assert batch.metrics["groups/no_signal_share"] == pytest.approx(1 / 3)
    assert batch.passes == {"test": Passes(samples=6, passed=4)}  # rejected groups count
    queue.trained(0, 1)
    assert (queue.counts()["trained"], queue.counts()["rejected"]) == (2, 1)


async def test_a_step_has_the_sums_of_what_was_counted_also_in_groups_that_are_not_trained_and_each_once():
    errors, moves = "reward/verifier_errors", "game/moves"
    queue = backlog(DYNAMIC)
    without_signal = replace(group(0, rewards=(0.0, 0.0)), counts={errors: 1, moves: 2})
    dropped = [Dropped.failed(1, "broken", {moves: 5}), Dropped.rejected(2, "full", {errors: 3})]
    trained = [replace(group(3), counts={errors: 1}), replace(group(4), counts={moves: 1})]
    counted = []
    for of_step in ([without_signal, *dropped, *trained], [group(5, version=1), group(6, version=1)]):
        for one in of_step:
            await queue.admit()
            queue.report(one)
        batch = await queue.next_batch()
        assert batch is not None
        counted.append({key: batch.metrics[key] for key in (errors, moves) if key in batch.metrics})
        queue.trained(batch.id, batch.id + 1)
    assert counted == [{errors: 5.0, moves: 8.0}, {errors: 0.0}]


async def test_dynamic_sampling_ends_with_an_error_when_no_group_has_a_signal():
    queue = backlog(DYNAMIC)
    batch = asyncio.create_task(queue.next_batch())
    for _ in range(RECENT_STEPS * DYNAMIC.groups_per_step):
        index = (await queue.admit()).index
        assert not queue.report(group(index, rewards=(0.0, 0.0)))
    said = "32 of the last 32 groups had no signal .*, more than backlog.max_no_signal_share=0.5"
    with pytest.raises(RunFailed, match=said):
        await batch
    with pytest.raises(RunFailed, match=said):
        await queue.admit()
    assert queue.settle()["rejected"] == 32


async def test_length_weights_multiply_the_advantages_of_their_group():
    settings = replace(SETTINGS, max_staleness=3, order="completion", length_correction="inverse_propensity")
    queue = backlog(settings)
    for _ in range(8):
        await queue.admit()
    for ticket in (1, 2, 4, 5):
        queue.report(group(ticket, length=3))
    await queue.next_batch()
    await queue.next_batch()
    queue.report(group(0, length=13))
    queue.report(group(6, length=3))
    rows = queue.rows((await queue.next_batch()).id, 0).rows
    # Known of what was launched are tickets 0, 1, 2: one of 3 is long. Of what is trained, one of 6: weights 2 and 4/5.
    sizes = {position.item() for position in rows["advantages"].abs().unique()}
    assert sorted(sizes) == pytest.approx([0.0, 4 / 7, 10 / 7], abs=1e-5)
    assert rows["advantages"][rows["positions"] > 3].abs().max() == pytest.approx(10 / 7, abs=1e-5)
