"""Four processes over gloo that divide a model along several axes at once do what one process does."""

import pytest

from goaly.models.context_parallel import is_cut
from goaly.train.microbatch import microbatch
from tests.unit.train.batches import pack
from tests.unit.train.layouts import ROWS, Compared, Layout, batch_documents, cases, compared

pytestmark = pytest.mark.slow

LAYOUTS = {
    "fsdp-cp": Layout({"fsdp": 2, "cp": 2, "activation_checkpointing": "full"}, layers=2),
    "tp-cp": Layout({"tp": 2, "cp": 2}, layers=2),
    "cp": Layout({"cp": 4, "activation_checkpointing": "selective", "microbatch_rows": ROWS}, layers=2),
    "experts-fsdp-cp-ep": Layout({"fsdp": 2, "cp": 2, "ep": 4}, layers=2),
    "lora-experts-tp-cp": Layout({"tp": 2, "cp": 2}, layers=2),
    "experts-fsdp-tp-ep4": Layout({"fsdp": 2, "tp": 2, "ep": 4}, ("replayed",)),
    "shared-experts-fsdp-tp-ep4": Layout({"fsdp": 2, "tp": 2, "ep": 4}, ("replayed",)),
    "few-experts-fsdp": Layout({"fsdp": 4, "microbatch_rows": 1}, layers=2),
    "few-experts-fsdp-tp-ep": Layout({"fsdp": 2, "tp": 2, "ep": 2}, layers=2),
    "bitwise-experts-fsdp-tp-ep2": Layout({"fsdp": 2, "tp": 2, "ep": 2}, layers=2),
    "experts-tp-cp-ep": Layout({"tp": 2, "cp": 2, "ep": 4, "activation_checkpointing": "full"}, layers=2),
}
"""Of `few-experts` each is divided, because there are more ranks."""


@pytest.fixture(scope="module")
def four_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    return compared(request, tmp_path_factory.mktemp("out"), LAYOUTS)


def test_documents_of_the_batch_go_on_in_the_shares_of_other_ranks():
    for part in pack(batch_documents(), rows=ROWS, row_length=160).rows.split(1):
        assert is_cut(microbatch(part, multiple_of=8).positions_1T[0], 2)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "what"), cases(LAYOUTS))
def test_ranks_of_several_axes_have_what_one_has(  # train-1, models-7, models-8
    four_ranks: Compared, name: str, what: str
):
    four_ranks.check(name, what)
