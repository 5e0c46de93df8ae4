"""A sampler with a trainer's weights computes a document in all its ways, and what it computes otherwise is named."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from goaly.generate import sampler_search
from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny import TinyModel, write_tiny_model
from goaly.train.engine import TrainEngine
from goaly.train.parity_search import of_tokens
from goaly.train.settings import TrainerSettings
from tests.actors.broken_sampler import search
from tests.loop.launched import gone_within
from tests.unit.train.batches import documents, pack

pytestmark = pytest.mark.timeout(120)
LENGTH = 60


def asked(tmp_path: Path, generator: GeneratorSettings) -> Path:
    """A folder that asks what a sampler computes otherwise than a trainer of one rank."""
    model = ModelSettings(path=str(write_tiny_model(tmp_path / "model", TinyModel(layers=2))), numerics="bitwise")
    engine = TrainEngine(model, TrainerSettings())
    rows = pack(documents(1, lengths=[LENGTH + 1]), rows=1, row_length=LENGTH + 1).rows
    sampler = sampler_search.SearchedSampler(
        model=model,
        generator=generator,
        tokens=rows["tokens"][0, :LENGTH].tolist(),
        outputs=of_tokens(engine.operations(rows)[0], 0, LENGTH),
    )
    torch.save(sampler, tmp_path / sampler_search.ASKED)
    return tmp_path


@pytest.mark.parametrize(
    ("side", "generator", "said"),
    [
        ("sampler", {"tp": 2}, "layers.1.attention.wo. The sampler computed the document in one step."),
        ("parts", {}, "layers.1.attention.wo. The sampler computed the document in two steps."),
        ("decoding", {}, "layers.1.attention.wo. The sampler computed the document in steps of one token."),
        (None, {}, "give the document the bits of one trainer rank"),
        (None, {"tp": 2}, "give the document the bits of one trainer rank"),
    ],
)
def test_the_first_operation_that_a_sampler_computes_otherwise_is_named_with_the_way_in_which_it_does(  # PC-2
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str | None, generator: Any, said: str
):
    folder = asked(tmp_path, GeneratorSettings(max_context=128, max_running=8, **generator))
    monkeypatch.setattr(sampler_search, "in_ranks", sampler_search.in_ranks)
    if side is None:
        sampler_search.main([str(folder)])
    else:
        search(side, "layers.1.attention.wo", str(folder))
    assert said in (folder / sampler_search.SAID).read_text()


OWNER = """
import sys
from goaly.generate import sampler_search
sampler_search.PROGRAM = (sys.executable, "-c", {program!r})
print(sampler_search.operation_of(None))
"""


def test_a_search_that_fails_says_why_and_no_process_of_it_outlives_its_trainer(tmp_path: Path):  # SY-1
    failing = OWNER.format(program="raise MemoryError('no room for a sampler')")
    said = subprocess.run([sys.executable, "-c", failing], capture_output=True, text=True).stdout
    assert said == "The search in a sampler failed: MemoryError: no room for a sampler\n"
    number = tmp_path / "pid"
    os.mkfifo(number)
    waiting = OWNER.format(
        program=f"import os, time; open({str(number)!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", waiting]) as owner:
        searching = int(number.read_text())
        owner.send_signal(signal.SIGKILL)
    assert gone_within([searching]) == []
