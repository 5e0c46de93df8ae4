"""Four processes over gloo that divide a model along several axes at once do what one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from goaly.models.context_parallel import is_cut
from goaly.run.rendezvous import lasting_port
from goaly.train.microbatch import microbatch
from tests.unit.train.batches import pack
from tests.unit.train.test_parallel import (
    ALONE,
    ROWS,
    SETTINGS,
    assert_same_replay,
    assert_same_step,
    batch_documents,
    replayed,
    settings_of,
    trained,
    write_model,
)

pytestmark = pytest.mark.slow

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp-cp": {"fsdp": 2, "cp": 2, "activation_checkpointing": "full"},
    "tp-cp": {"tp": 2, "cp": 2},
    "cp": {"cp": 4, "activation_checkpointing": "selective", "microbatch_rows": ROWS},
    "experts-fsdp-cp-ep": {"fsdp": 2, "cp": 2, "ep": 4},
    "lora-experts-tp-cp": {"tp": 2, "cp": 2},
    "experts-fsdp-tp-ep4": {"fsdp": 2, "tp": 2, "ep": 4},
    "shared-experts-fsdp-tp-ep4": {"fsdp": 2, "tp": 2, "ep": 4},
    "few-experts-fsdp": {"fsdp": 4, "microbatch_rows": 1},
    "few-experts-fsdp-tp-ep": {"fsdp": 2, "tp": 2, "ep": 2},
    "bitwise-experts-fsdp-tp-ep2": {"fsdp": 2, "tp": 2, "ep": 2},
    "experts-tp-cp-ep": {"tp": 2, "cp": 2, "ep": 4, "activation_checkpointing": "full"},
}
"""Of `few-experts` each is divided, because there are more ranks."""
REPLAYED = [name for name in LAYOUTS if "fsdp-tp-ep4" in name and "bitwise" not in name]


def in_each_process(rank: int, port: int, models: Path, out: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    for name, changed in LAYOUTS.items():
        settings = settings_of(name, SETTINGS, **changed)
        found = trained(models / name, settings)
        found["leads"] = found.pop("engine").leads
        torch.save(found, out / f"{name}.{rank}")
        if name in REPLAYED:
            torch.save(replayed(models / name, settings), out / f"{name}.replayed.{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models, and of what four processes gave for each layout."""
    folder = tmp_path_factory.mktemp("out")
    for layout in LAYOUTS:
        write_model(folder / layout, layers=1 if layout in REPLAYED else 2)
    arguments = (lasting_port(), folder, folder)
    torch.multiprocessing.start_processes(in_each_process, arguments, nprocs=4, start_method="forkserver")
    return folder


def test_documents_of_the_batch_go_on_in_the_shares_of_other_ranks():
    for part in pack(batch_documents(), rows=ROWS, row_length=160).rows.split(1):
        assert is_cut(microbatch(part, multiple_of=8).positions_1T[0], 2)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_several_axes_have_the_gradient_metrics_and_step_of_one(  # train-1, CP-3, CP-4
    out: Path, layout: str
):
    alone, degrees = trained(out / layout, settings_of(layout, ALONE)), LAYOUTS[layout]
    for rank in range(4):
        found = torch.load(out / f"{layout}.{rank}", weights_only=False)
        assert_same_step(found, alone, degrees)
        rows = alone["logprobs"][found["dp_rank"] :: degrees.get("fsdp", 1)]
        assert torch.equal(found["logprobs"], rows) or "bitwise" not in layout  # BW-2, BE-2
        alike = degrees.get("cp", 1) * degrees.get("tp", 1)
        assert (found["dp_rank"], found["leads"]) == (rank // alike, rank % alike == 0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", REPLAYED)
def test_ranks_of_several_axes_replay_choices_of_experts_as_one_does(out: Path, layout: str):  # train-3
    alone = replayed(out / layout, settings_of(layout, ALONE))
    for rank in range(4):
        found = torch.load(out / f"{layout}.replayed.{rank}", weights_only=False)
        assert_same_replay(found, alone, LAYOUTS[layout])
