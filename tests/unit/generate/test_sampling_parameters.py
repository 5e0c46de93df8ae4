"""What vLLM's second model runner cannot sample is known before a request reaches it; and log-probs beside a limit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.sample import logit_bias

from goaly.generate.request import Sampling
from goaly.generate.sampling_parameters import LARGEST_SEED, limits_of

MOST, MOST_STOPS = logit_bias.MAX_NUM_ALLOWED_TOKEN_IDS, logit_bias.MAX_NUM_STOP_TOKEN_IDS


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"allowed_token_ids": range(MOST + 1)}, f"allowed_token_ids has {MOST + 1} tokens, must have at most {MOST}"),
        ({"logit_bias": dict.fromkeys(range(MOST + 1), 0.5)}, f"logit_bias has {MOST + 1} tokens, must have at most"),
        (
            {"stop_token_ids": range(MOST_STOPS + 1), "min_tokens": 1},
            f"stop_token_ids with min_tokens has {MOST_STOPS + 1} tokens, must have at most {MOST_STOPS} on a GPU",
        ),
        ({"seed": LARGEST_SEED + 1}, f"seed={LARGEST_SEED + 1}: must be at most {LARGEST_SEED} on a GPU"),
    ],
    ids=["allowed", "bias", "stops", "seed"],
)
def test_what_the_second_runner_would_fail_on_is_named(sampling: dict[str, Any], problem: str) -> None:
    asked = Sampling(**sampling)
    assert problem in str(limits_of(True)(asked))
    assert limits_of(False)(asked) is None


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"allowed_token_ids": range(MOST), "seed": LARGEST_SEED},
        {"stop_token_ids": range(MOST_STOPS + 1)},
        {"stop_token_ids": range(MOST_STOPS), "min_tokens": 1},
    ],
)
def test_all_else_may_be_sampled(sampling: dict[str, Any]) -> None:
    assert limits_of(True)(Sampling(**sampling)) is None


def test_log_probs_are_the_trainers_beside_requests_with_a_limit() -> None:  # train-10
    from goaly.numerics.bitwise_backend import use_exact_logprobs

    logits_RV = torch.randn(4, 10)
    drawn = torch.zeros(4)
    within = SimpleNamespace(forward=lambda *_: (drawn, torch.full((4, 10), 7.0)))
    sampler: Any = SimpleNamespace(topk_topp_sampler=within, compute_logprobs=None)
    use_exact_logprobs(sampler)
    top_k, top_p = torch.tensor([10, 3, 10, 10]), torch.tensor([1.0, 1.0, 0.9, 1.0])
    sampled, logprobs_RV = within.forward(logits_RV, {}, top_k, top_p)
    assert sampled is drawn
    exact_RV = logits_RV.log_softmax(-1)
    assert torch.equal(logprobs_RV[[0, 3]], exact_RV[[0, 3]])
    assert (logprobs_RV[[1, 2]] == 7).all()
    assert torch.equal(within.forward(logits_RV, {}, None, None)[1], exact_RV)
    assert torch.equal(within.forward(logits_RV, {}, None, top_p)[1][1], exact_RV[1])
