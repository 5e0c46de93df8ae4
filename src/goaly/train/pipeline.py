"""Pipeline parallelism: stages, which are groups of ranks, have the layers of a model one after another.

Each rank of a stage works with one rank of every other stage, its column, on the same rows. A microbatch goes forward
through the column, and its gradient back: a rank sends hidden states to the next stage and their gradients to the
previous one. The order of passes is 1F1B (arXiv:2104.04473): a stage begins with so many forward passes that the next
stage is never without work, and then alternates between backward and forward passes.

torchtitan's schedules want microbatches of one shape. Packed microbatches have any number of tokens, but all ranks of a
column know them, so the schedule here is goaly's own and pads nothing. One rank alone is the only stage of its
pipeline.

Each layer is in one stage, in order, and each stage has one at least. The first stage has the embedding, the last one
the norm and the head. A rank of stage s of S holds the activations of at most S - s microbatches. The backward pass of
a microbatch finds the layers' state as its forward pass did: activation checkpointing computes the layers again, after
the forward passes of other microbatches. All ranks of the last stage's column get its results, such as metrics and
log-probs. The ranks that write a folder get the tensors of all stages, in the order of the stages.

Invariant
    train-8: Each message is received, and no rank waits for one that is sent only after its own, for any numbers of
        stages and microbatches.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from goaly.base.watchdog import progress
from goaly.train.microbatch import Microbatch
from goaly.trajectory import TensorDict

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a model."""

    number: int
    count: int
    """Stages of the model."""
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether it has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the last norm and the head."""
        return self.number == self.count - 1


def stage_of(layers: int, count: int, number: int) -> Stage:
    """A stage of a model with this number of layers. The embedding and the head count as a layer each, if every stage
    still has one."""
    assert count <= layers, "the settings are checked"
    ends = int(layers + 2 >= 2 * count)
    first, stop = (-(-(layers + 2 * ends) * stage // count) - ends for stage in (number, number + 1))
    return Stage(number=number, count=count, layers=range(max(first, 0), min(stop, layers)))


def keep_stage(model: Any, stage: Stage) -> None:
    """Remove what belongs to other stages from a model that has no memory yet."""
    for name in [name for name in model.layers if int(name) not in stage.layers]:
        del model.layers[name]
    if not stage.is_first:
        model.tok_embeddings = None
    if not stage.is_last:
        model.norm = model.lm_head = None


class PassOrder(NamedTuple):
    """A pass of a microbatch in the order of passes."""

    microbatch: int
    is_backward: bool


def schedule(stage: Stage, microbatches: int, *, trains: bool) -> list[PassOrder]:
    """The passes of a stage in their order; without `trains` forward passes only."""
    if not trains:
        return [PassOrder(number, False) for number in range(microbatches)]
    early = min(stage.count - 1 - stage.number, microbatches)
    order = [PassOrder(number, False) for number in range(early)]
    for number in range(early, microbatches):
        order += [PassOrder(number, False), PassOrder(number - early, True)]
    return order + [PassOrder(number, True) for number in range(microbatches - early, microbatches)]


class _Message(NamedTuple):
    tensor: Tensor
    to: int
    """The stage that gets it."""


class Pipeline:
    """The stages of a model on the ranks of this one's column."""

    def __init__(
        self,
        stage: Stage,
        *,
        mesh: DeviceMesh | None = None,
        tp_mesh: DeviceMesh | None = None,
        writes: bool = True,
        hidden: Callable[[int], Tensor] | None = None,
    ):
        """`mesh` is the column's; None if there is only one stage. `hidden` makes an empty tensor for this rank's
        hidden states of a microbatch of so many tokens, which tensor-parallel ranks divide among `tp_mesh`. The column
        `writes` if it has the rank that writes folders."""
        self.stage = stage
        self.mesh = mesh
        self._group = None if mesh is None else mesh.get_group()
        self._tp_mesh = tp_mesh
        self._writes = writes
        self._hidden = hidden
        if self._group is not None:
            dist.barrier(self._group)  # NCCL wants all ranks in a group's first call

    def run(
        self,
        rows: Sequence[TensorDict],
        prepare: Callable[[TensorDict], Microbatch],
        forward: Callable[[Microbatch, Tensor | None], Tensor | None],
        restore: Callable[[Microbatch], None] | None = None,
    ) -> None:
        """Take a microbatch for each of these `rows` through all stages; every rank of the column must call it.

        `forward` gets the hidden states of the previous stage, and gives this stage's or, on the last one, the loss.
        Without `restore`, which is called before each backward pass, there are only forward passes.
        """
        trains = restore is not None
        waiting: dict[int, tuple[Microbatch, Tensor | None, Tensor]] = {}
        """Microbatches whose backward pass is to come, with what arrived and the output."""
        sent: _Message | None = None
        for number, is_backward in schedule(self.stage, len(rows), trains=trains):
            progress()
            if is_backward and restore is not None:
                batch, arrived, output = waiting.pop(number)
                gradient = self._exchange(sent, batch, self.stage.number + 1)
                restore(batch)
                output.backward(gradient)
                sent = None
                if arrived is not None:
                    assert arrived.grad is not None
                    sent = _Message(arrived.grad.contiguous(), self.stage.number - 1)
            else:
                batch = prepare(rows[number])
                arrived = self._exchange(sent, batch, self.stage.number - 1)
                sent, output = self._forward(batch, arrived, forward, trains=trains)
                if trains and output is not None:
                    waiting[number] = batch, arrived, output
            del batch, arrived, output
        self._exchange(sent)

    def from_last(self, found: Found) -> Found:
        """The last stage's value, on every rank of the column, which all must call it."""
        if self._group is None:
            return found
        box: list[Any] = [found if self.stage.is_last else None]
        dist.broadcast_object_list(box, group=self._group, group_src=self.stage.count - 1)
        return box[0]

    def gathered(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of this stage, and on the rank that writes folders after them those of the later stages, in CPU
        memory. Every rank must take them all."""
        for name, tensor in tensors:
            if self._writes and not self.stage.is_first:
                dist.send_object_list([(name, tensor.shape, tensor.dtype)], group=self._group, group_dst=0)
                dist.send(tensor.cpu().contiguous(), group=self._group, group_dst=0)
            yield name, tensor
        if self._writes and not self.stage.is_first:
            dist.send_object_list([None], group=self._group, group_dst=0)
        elif self._writes:
            for stage in range(1, self.stage.count):
                while True:
                    about: list[Any] = [None]
                    dist.recv_object_list(about, group=self._group, group_src=stage)
                    if about[0] is None:
                        break
                    name, shape, dtype = about[0]
                    tensor = torch.empty(shape, dtype=dtype)
                    dist.recv(tensor, group=self._group, group_src=stage)
                    yield name, tensor

    def _forward(
        self,
        batch: Microbatch,
        hidden: Tensor | None,
        forward: Callable[[Microbatch, Tensor | None], Tensor | None],
        *,
        trains: bool,
    ) -> tuple[_Message | None, Tensor | None]:
        """The message to the next stage, and the output of this one, of which tensor-parallel ranks have parts."""
        if hidden is not None:
            hidden.requires_grad_(trains)
            if self._tp_mesh is not None:
                hidden = DTensor.from_local(hidden, self._tp_mesh, [Shard(1)], run_check=False)
        output = forward(batch, hidden)
        if self.stage.is_last or output is None:
            return None, output
        if isinstance(output, DTensor):
            assert output.placements == (Shard(1),), "sequence parallelism divides hidden states between blocks"
            output = output.to_local()
        return _Message(output.detach(), self.stage.number + 1), output

    def _exchange(self, sent: _Message | None, batch: Microbatch | None = None, source: int = -1) -> Tensor | None:
        """Send what a pass gave, and receive what the stage `source`, if there is one, sends of this microbatch:
        at once, because the two may wait for each other (train-8)."""
        arriving, operations = None, []
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent.tensor, group=self._group, group_peer=sent.to))
        if batch is not None and 0 <= source < self.stage.count:
            assert self._hidden is not None
            arriving = self._hidden(batch.tokens_1T.shape[1])
            operations.append(dist.P2POp(dist.irecv, arriving, group=self._group, group_peer=source))
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()  # unblocked by the neighbour's pass
        return arriving
