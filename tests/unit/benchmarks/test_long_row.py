"""A row that takes more memory than a rank may have is trained by two."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.memory import MIB, peak_of
from goaly.losses.objective import Likelihood
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.run.rendezvous import in_ranks
from goaly.train.settings import TrainerSettings
from goaly.trajectory import PackedRows, TensorDict

pytestmark = pytest.mark.slow

TOKENS = 64 * 1024
DOCUMENT = 6000
"""Tokens of each document; the borders of shares, at 16k, 32k and 48k tokens, are inside of some."""
SIZE = TinyModel(dim=32, layers=1, heads=1, kv_heads=1, head_dim=16, hidden_dim=256, max_context=DOCUMENT)
MOST_MIB = 320
"""What a rank's tensors may take: parameters, gradients, optimizer, activations and all that operations need beside."""


def long_row() -> PackedRows:
    """A single row of documents; all but the first token of each is trained."""
    positions = (torch.arange(TOKENS) % DOCUMENT)[None]
    tokens = torch.randint(0, 32, positions.shape, generator=torch.Generator().manual_seed(0))
    rows = TensorDict({"tokens": tokens, "positions": positions, "trained": positions > 0}, batch_size=[1, TOKENS])
    trained = int(rows["trained"].sum())
    return PackedRows(rows=rows, batch_trained_tokens=trained, batch_sequences=-(-TOKENS // DOCUMENT))


def train(rank: int, model: ModelSettings, settings: TrainerSettings, out: Path) -> None:
    """Two optimizer steps; the metrics of the second, and what the tensors took in it."""
    from goaly.train.rank_thread import join_process_group
    from goaly.train.train_engine import TrainEngine

    join_process_group(1, settings.ranks)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        engine = TrainEngine(model, settings)
        engine.train_step(long_row(), Likelihood())
        with torch.profiler.record_function("second"):
            metrics = engine.train_step(long_row(), Likelihood())
    out.with_suffix(f".{rank}").write_text(json.dumps({"mib": peak_of(profile) / MIB, "metrics": metrics}))


@pytest.mark.timeout(240)
def test_two_ranks_train_a_row_of_64k_tokens_in_memory_that_one_rank_exceeds(tmp_path: Path):
    model = ModelSettings(path=str(write_tiny_model(tmp_path / "model", SIZE)))

    def trained_by(ranks: int) -> list[dict[str, Any]]:
        out = tmp_path / f"{ranks}"
        in_ranks(train, ranks, (model, TrainerSettings(cp=ranks), out))
        return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(ranks)]

    [alone], both = trained_by(1), trained_by(2)
    assert alone["mib"] > MOST_MIB
    for found in both:
        assert found["mib"] < MOST_MIB
        assert found["metrics"] == pytest.approx(alone["metrics"], rel=1e-3)
