"""A Llama in vLLM's engine on two ranks, against plain transformers."""

from pathlib import Path

import pytest
import torch
from random_model import VOCABULARY, write_random_llama

from goaly.generate.settings import GeneratorSettings
from goaly.models.settings import ModelSettings
from goaly.parity import Sampler, mixed_requests, sample_in_ranks

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

NOISE = 2e-4


def test_two_ranks_sample_from_the_model_that_transformers_has(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    folder = write_random_llama(tmp_path / "model")
    generator = GeneratorSettings(max_running=16, max_context=256, kv_cache_gib=0.01, tp=2)
    asked = mixed_requests(16, vocabulary=len(VOCABULARY), longest=200)
    sample_in_ranks(
        Sampler(model=ModelSettings(path=str(folder)), generator=generator, asked=asked), tmp_path / "sampled"
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sequence in torch.load(tmp_path / "sampled"):
        tokens_T, trained_T = sequence["tokens"], sequence["trained"]
        with torch.no_grad():
            logprobs_TV = model(tokens_T[None].long()).logits[0].log_softmax(-1)
        expected_T = logprobs_TV[:-1].gather(1, tokens_T[1:, None].long())[:, 0]
        sampled_P = sequence["sampler_logprobs"][trained_T]
        torch.testing.assert_close(sampled_P, expected_T[trained_T[1:]], atol=NOISE, rtol=0)
