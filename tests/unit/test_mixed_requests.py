"""The requests of the parity check fill any context, and its cache cannot hold them."""

from pathlib import Path

import pytest

from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.parity import LONG, SHARED, SHORT, cramped, mixed_requests
from goaly.parity_search import GIB


@pytest.mark.parametrize("longest", [128, 512, 4096, 32768])
def test_some_answers_reach_the_limit_and_no_sequence_exceeds_it(longest: int):
    asked = mixed_requests(64, vocabulary=30, longest=longest)
    assert [one.tokens for one in asked[:LONG]] == [longest] * LONG
    assert max(one.tokens for one in asked) == longest
    assert max(len(one.prompt) for one in asked) == longest // 2
    assert sum(one.tokens for one in asked) < (LONG + SHARED / 2) * longest + 64 * 2 * SHORT
    assert sum(one.tokens < 64 for one in asked) > 16


@pytest.mark.parametrize("requests", [12, 64])
@pytest.mark.parametrize("longest", [512, 4096])
def test_the_cache_holds_the_longest_sequence_and_not_what_runs_at_once(tmp_path: Path, requests: int, longest: int):
    size = TinyModel(layers=2, kv_heads=2, head_dim=32)
    model = ModelSettings(path=str(write_tiny_model(tmp_path, size)))
    asked = mixed_requests(requests, vocabulary=30, longest=longest)
    generator = cramped(model, GeneratorSettings(max_running=32, max_context=longest), asked)
    token = 2 * 2 * 2 * 32 * 4
    held = generator.kv_cache_gib * GIB / token
    assert longest < held < 0.51 * LONG * longest
    assert max(len(one.prompt) for one in asked) > generator.max_step_tokens
