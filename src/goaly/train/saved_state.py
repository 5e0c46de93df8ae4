"""An engine's state in a checkpoint: staged in host memory by the rank's thread, then written by another thread.

The state is the engine's `state_dict`. Its folder is one of torch.distributed.checkpoint, which any mesh can load: the
plans below give it the rectangles of every rank, as the weight store has them, because it finds wrong ones itself
where FSDP and tensor parallelism divide one dim unevenly (weights-11).

`write` writes the state of the last `stage`, whatever the engine has done since. All ranks' files of a folder have the
state of one version.

Invariant
    train-5: A state loads into any mesh unchanged, also with more or fewer stages. A folder with other tensors, shapes
        or types than all ranks have together is refused.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from goaly.train.model_engine import ModelEngine
from goaly.weights.digest import several_ranks
from goaly.weights.dtensor_layout import layout_of, local
from goaly.weights.layout import Layout, region

SHOWN = 3
"""Names that an error shows."""


class StagedState:
    """A copy of an engine's state in host memory, which is allocated once. `stage` and `write` must take turns."""

    def __init__(self, engine: ModelEngine):
        """All ranks must make theirs at the same time: `write` gets a process group of its own."""
        self._engine = engine
        self._state = engine.state_dict()
        self._group = dist.new_group(backend="gloo") if several_ranks() else None
        live = _local_tensors(self._state)
        self._copies = {name: _LocalTensor(one.layout, _host(one.local)) for name, one in live.items()}
        self._version = -1

    def stage(self) -> int:
        """Copy the state, and return its version. The engine may change once this returns."""
        sources = [local(tensor) for tensor in self._state.values()]
        on_gpu = any(source.is_cuda for source in sources)
        torch._foreach_copy_([copy.local for copy in self._copies.values()], sources, non_blocking=on_gpu)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self._version = self._engine.steps_done
        return self._version

    def write(self, folder: Path) -> None:
        """Write what all ranks have staged, and sync it. An OSError names the file."""
        self._check_version()
        files = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        files.fs = _Files()
        with _cause_raised(folder):
            dcp.save(
                self._copies,
                storage_writer=files,
                planner=_SavePlanner(),
                process_group=self._group,
                no_dist=self._group is None,
            )

    def _check_version(self) -> None:
        versions = [self._version]
        if self._group is not None:
            versions *= self._group.size()
            dist.all_gather_object(versions, self._version, self._group)
        assert self._version >= 0, "stage comes before write"
        assert len(set(versions)) == 1, f"the ranks staged different versions: {versions}"


def load_state(engine: ModelEngine, folder: Path, *, steps_done: int | None = None) -> None:
    """Continue from the state in this folder, as if it were that after `steps_done` steps; None: those of the state.
    Every rank must call it."""
    (folder / ".metadata").stat()  # or it would be reported as an assertion
    state = engine.state_dict()
    names = set(state)
    if several_ranks():
        of_ranks: list[set[str]] = [names] * dist.get_world_size()
        dist.all_gather_object(of_ranks, names)
        names = names.union(*of_ranks)
    with _cause_raised(folder):
        dcp.load(
            _local_tensors(state),
            storage_reader=dcp.FileSystemReader(folder),
            planner=_LoadPlanner(names),
            no_dist=not several_ranks(),
        )
    if steps_done is not None:
        state["steps_done"].fill_(steps_done)
    engine.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class _LocalTensor:
    """The rectangles of a tensor that this rank holds, and the local tensor that they are in."""

    layout: Layout
    local: Tensor

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.shape)) for one in self.layout]

    def part(self, index: MetadataIndex) -> Tensor:
        """The rectangle that begins at the index's offset."""
        return next(region(self.local, *one.place) for one in self.layout if one.offset == index.offset)


def _local_tensors(state: Mapping[str, Tensor]) -> dict[str, _LocalTensor]:
    return {name: _LocalTensor(layout_of({name: tensor}), local(tensor)) for name, tensor in state.items()}


def _host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class _SavePlanner(DefaultSavePlanner):
    """Plans the rank's rectangles. A rectangle that several ranks hold is written by one of them."""

    state_dict: dict[str, _LocalTensor]

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        """A write for each rectangle."""
        self.plan = SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, chunk.offsets),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=chunk,
                        properties=TensorProperties.create_from_tensor(held.local),
                        size=torch.Size(held.layout[0].global_shape),
                    ),
                )
                for name, held in self.state_dict.items()
                for chunk in held.chunks
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The elements of a rectangle."""
        return self.state_dict[index.fqn].part(index)


class _LoadPlanner(DefaultLoadPlanner):
    """Plans reads into the rank's rectangles."""

    state_dict: dict[str, _LocalTensor]

    def __init__(self, names: set[str]):
        """`names` are those of all ranks' tensors."""
        super().__init__()
        self._names = names

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False) -> None:
        """Refuse a folder of another model (train-5)."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        saved = metadata.state_dict_metadata
        for names, problem in ((self._names - saved.keys(), "has no"), (saved.keys() - self._names, "also has")):
            if names:
                raise ValueError(f"the checkpoint {problem} {', '.join(sorted(names)[:SHOWN])}; is it another model's?")
        for name, held in self.state_dict.items():
            kept = saved[name]
            for one in held.layout:
                if (tuple(kept.size), kept.properties.dtype) != (one.global_shape, one.dtype):
                    raise ValueError(
                        f"`{name}` is {kept.properties.dtype} {tuple(kept.size)} in the checkpoint and {one.dtype} "
                        f"{one.global_shape} in the model"
                    )

    def create_local_plan(self) -> LoadPlan:
        """The reads that fill each rectangle."""
        saved = self.metadata.state_dict_metadata
        return LoadPlan(
            [
                item
                for name, held in self.state_dict.items()
                for item in create_read_items_for_chunk_list(name, saved[name], held.chunks)
            ]
        )

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The rectangle to fill."""
        return self.state_dict[index.fqn].part(index)


class _Files(FileSystem):
    """Files that are synced at their end, and whose errors name them: a failed write, as on a full disk, does not."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """An open file."""
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
                if mode == "wb" and not stream.closed:  # DCP syncs its metadata before it has left Python's buffer
                    stream.flush()
                    os.fsync(stream.fileno())
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__  # PyTorch's own error follows
            if cause is None or cause.filename is not None:
                raise
            raise OSError(cause.errno, cause.strerror, str(path)) from error


@contextmanager
def _cause_raised(folder: Path) -> Iterator[None]:
    """Raise a rank's own error in place of DCP's, which is no Exception."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # for good: other threads run
    try:
        yield
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        first = next((cause for cause in causes if isinstance(cause, OSError)), causes[0])
        if isinstance(first, OSError):
            raise first from error
        raise ValueError(f"{folder}: {first}") from error
