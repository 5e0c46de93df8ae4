"""Pipeline parallelism: stages, which are groups of ranks, have the layers of a model one after another.

Each rank of a stage works with one rank of every other stage, its column, on the same rows. A microbatch goes forward
through the column, and its gradient back: a rank sends hidden states to the next stage and their gradients to the
previous one. The order of passes is 1F1B (arXiv:2104.04473): a stage begins with enough forward passes to keep the
next stage busy, and then alternates between backward and forward passes.

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


def entering(hidden_1LD: Tensor, tp_mesh: DeviceMesh | None) -> Tensor:
    """The hidden states that a stage computes with, of which each tensor-parallel rank got its part."""
    return hidden_1LD if tp_mesh is None else DTensor.from_local(hidden_1LD, tp_mesh, [Shard(1)], run_check=False)


def leaving(hidden_1TD: Tensor) -> Tensor:
    """This rank's part of the hidden states that a stage gave."""
    if not isinstance(hidden_1TD, DTensor):
        return hidden_1TD
    assert hidden_1TD.placements == (Shard(1),), "sequence parallelism divides hidden states between blocks"
    return hidden_1TD.to_local()


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


@dataclass(slots=True)
class Pass:
    """A pass of a microbatch through this stage. The code that runs a forward pass sets its output."""

    batch: Microbatch
    is_backward: bool = False
    arrived: Tensor | None = None
    """The hidden states of the previous stage; None on the first one."""
    output: Any = None
    """This stage's hidden states or, on the last one, the loss; None without a loss."""
    gradient: Tensor | None = None
    """That of the output, in a backward pass; None on the last stage."""


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
        hidden states of a microbatch with N tokens, which tensor-parallel ranks divide among `tp_mesh`. The column
        `writes` if it has the rank that writes folders."""
        self.stage = stage
        self.mesh = mesh
        self._group = None if mesh is None else mesh.get_group()
        self._tp_mesh = tp_mesh
        self._writes = writes
        self._hidden = hidden
        if self._group is not None:
            dist.barrier(self._group)  # NCCL wants all ranks in a group's first call

    def passes(
        self, rows: Sequence[TensorDict], prepare: Callable[[TensorDict], Microbatch], *, trains: bool
    ) -> Iterator[Pass]:
        """The passes of a microbatch for each of these `rows` through this stage, each as soon as its input is here;
        every rank of the column must take them all. Without `trains` there are only forward passes."""
        waiting: dict[int, tuple[Pass, Tensor | None]] = {}
        """Microbatches whose backward pass is to come, with what arrived."""
        sent: _Message | None = None
        for number, is_backward in schedule(self.stage, len(rows), trains=trains):
            progress()
            if is_backward:
                each, arrived = waiting.pop(number)
                each.gradient = self._exchange(sent, each.batch, self.stage.number + 1)
                each.is_backward, sent = True, None
                yield each
                if arrived is not None:
                    assert arrived.grad is not None
                    sent = _Message(arrived.grad.contiguous(), self.stage.number - 1)
            else:
                each = Pass(prepare(rows[number]))
                arrived = self._exchange(sent, each.batch, self.stage.number - 1)
                if arrived is not None:
                    each.arrived = entering(arrived.requires_grad_(trains), self._tp_mesh)
                yield each
                each.arrived, sent = None, None
                if not self.stage.is_last and each.output is not None:
                    each.output = leaving(each.output)
                    sent = _Message(each.output.detach(), self.stage.number + 1)
                if trains and each.output is not None:
                    waiting[number] = each, arrived
            del each, arrived
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
