"""Four processes over gloo that also divide the tokens of each row do what one process does."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from goaly.models.context_parallel import is_cut
from goaly.models.tiny import TinyModel, write_tiny_model
from goaly.run.process_agent import lasting_port
from goaly.train.microbatch import microbatch
from tests.unit.train.batches import pack
from tests.unit.train.test_parallel import ALONE, EXPERTS, ROWS, SETTINGS, batch_documents, settings_of, trained

LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp-cp": {"fsdp": 2, "cp": 2, "activation_checkpointing": "full"},
    "tp-cp": {"tp": 2, "cp": 2},
    "cp": {"cp": 4, "activation_checkpointing": "selective", "microbatch_rows": ROWS},
    "experts-fsdp-cp-ep": {"fsdp": 2, "cp": 2, "ep": 4},
    "lora-experts-tp-cp": {"tp": 2, "cp": 2},
}

CHECKPOINTED = "_checkpoint_wrapped_module."
"""In the names of parameters in blocks that are computed again."""


def in_each_process(rank: int, port: int, models: Path, out: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    for name, changed in LAYOUTS.items():
        found = trained(models / name, settings_of(name, SETTINGS, **changed))
        found["leads"] = found.pop("engine").leads
        torch.save(found, out / f"{name}.{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the models, and of what four processes gave for each layout."""
    folder = tmp_path_factory.mktemp("out")
    for layout in LAYOUTS:
        write_tiny_model(folder / layout, TinyModel(layers=2, **(EXPERTS if "experts" in layout else {})))
    arguments = (lasting_port(), folder, folder)
    torch.multiprocessing.start_processes(in_each_process, arguments, nprocs=4, start_method="forkserver")
    return folder


def test_documents_of_the_batch_go_on_in_the_shares_of_other_ranks():
    for part in pack(batch_documents(), rows=ROWS, row_length=160).rows.split(1):
        assert is_cut(microbatch(part, multiple_of=8).positions_1T[0], 2)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_divide_rows_have_the_gradient_metrics_and_step_of_one(out: Path, layout: str):  # TE-1, CP-3, CP-4
    alone = trained(out / layout, settings_of(layout, ALONE))
    degrees = LAYOUTS[layout]
    for rank in range(4):
        found = torch.load(out / f"{layout}.{rank}", weights_only=False)
        gradients = {name.replace(CHECKPOINTED, ""): one for name, one in found["gradients"].items()}
        assert gradients.keys() == alone["gradients"].keys()
        for name, one in alone["gradients"].items():
            tolerance = 5e-6 * one.abs().max().item() + 1e-8
            torch.testing.assert_close(gradients[name], one, atol=tolerance, rtol=2e-3, msg=name)
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-6)
        rows = alone["logprobs"][found["dp_rank"] :: degrees.get("fsdp", 1)]
        torch.testing.assert_close(found["logprobs"], rows, atol=1e-5, rtol=1e-4)
        assert found["resumed"]
        alike = degrees["cp"] * degrees.get("tp", 1)
        assert (found["dp_rank"], found["leads"]) == (rank // alike, rank % alike == 0)
