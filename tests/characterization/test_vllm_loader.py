"""The naming for vLLM's own model against vLLM's own loader (models-9): it fails if vLLM names or fuses otherwise."""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from random_model import native_tensors, write_random_model

from goaly.generate.settings import GeneratorSettings
from goaly.models.families import architecture, read_config
from goaly.models.settings import ModelSettings
from goaly.models.vllm_naming import vllm_naming, without_padding
from goaly.plan.generator_memory import replica_memory
from goaly.weights.dtensor_layout import layout_of
from goaly.weights.fetched_weights import FetchedWeights
from goaly.weights.layout import region, view
from goaly.weights.reshard_plan import plan

pytestmark = pytest.mark.timeout(150)

SIZES = [(tp, rank) for tp in (1, 2, 4) for rank in range(tp)]


def loaded(folder: Path, tp: int, rank: int) -> dict[str, torch.Tensor]:
    """The parameters of vLLM's model, loaded by itself, before any prepacking. This process is taken for that rank."""
    from goaly.generate import vllm_engine  # noqa: F401 # isort: skip; its environment comes before vLLM

    from safetensors.torch import load_file
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
    if not parallel_state.model_parallel_is_initialized():
        with set_current_vllm_config(config):
            parallel_state.init_distributed_environment(1, 0, f"file://{folder}.meeting", 0, backend="gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
    group = parallel_state.get_tp_group()
    group.world_size, group.rank_in_group = tp, rank
    model = initialize_model(config)
    model.load_weights(load_file(folder / "model.safetensors").items())
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def child() -> Iterator[ProcessPoolExecutor]:
    """A process that has vLLM."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as child:
        yield child


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_vllms_loader_puts_in_place_what_the_naming_does(
    child: ProcessPoolExecutor, tmp_path: Path, tied: bool
) -> None:
    """4 query heads, 2 key heads and 32 tokens in an embedding of 64: at tp=4 ranks share a key head, and two have
    no token."""
    from goaly.models.definition import model_spec

    folder = write_random_model(tmp_path / "model", tie_word_embeddings=tied)
    published = native_tensors(model_spec(folder), folder)
    shape, model = architecture(read_config(folder)), ModelSettings(path=str(folder))
    for tp, rank in SIZES:
        expected = child.submit(loaded, folder, tp, rank).result(timeout=140)
        naming = vllm_naming(shape, tp=tp, rank=rank)
        assert naming.keys() - expected.keys() == ({"lm_head.weight"} if tied else set())
        received = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        fill(without_padding(received, naming), published, naming)
        for name, tensor in expected.items():
            assert torch.equal(received[name], tensor), (tp, rank, name)
        planned = replica_memory(shape, model, GeneratorSettings(engine="native", tp=tp), None)
        (memory,) = [memory for ranks, memory in planned.items() if rank in ranks]
        assert memory.weights == sum(tensor.nbytes for tensor in expected.values())
        assert memory.updated == sum(one.nbytes for one in without_padding(received, naming).values())


def fill(received: dict[str, torch.Tensor], published: dict[str, torch.Tensor], naming: Any) -> None:
    """As a subscriber does."""
    destination = FetchedWeights(received, naming=naming)
    destination.allocate(published)
    targets, layout = destination.targets(), layout_of(published)
    for copy in plan([layout], destination.layout):
        source = region(view(published, layout[copy.source_shard]), copy.source_offset, copy.shape)
        region(targets[copy.shard], copy.offset, copy.shape).copy_(source)
    destination.apply()
