"""How a request is sampled, in vLLM's words.

vLLM's second model runner, which GPUs use, finds out in the middle of a step what it cannot sample, and the error would
end the replica. So requests are checked before they reach it.
"""

from collections.abc import Callable

from vllm import SamplingParams

from goaly.generate.request import Sampling

LARGEST_SEED = 2**63 - 1


def parameters(sampling: Sampling) -> SamplingParams:
    """The request's parameters for vLLM, without stop strings: vLLM's front end finds those, which is not used here."""
    distribution = sampling.distribution
    del distribution["structured_outputs"]  # vLLM would ask for its tokenizer; `Grammars` has one
    if distribution["allowed_token_ids"] is not None:
        distribution["allowed_token_ids"] = list(sampling.allowed_token_ids or ())  # a tuple breaks the engine's step
    return SamplingParams(
        **distribution,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids or ()),
        seed=sampling.seed,
        logprobs=0,
        ignore_eos=True,  # only the caller's stop tokens and strings end an answer
        detokenize=False,
        skip_clone=True,
    )


def limits_of(is_second_runner: bool) -> Callable[[Sampling], str | None]:
    """A function that names the parameter of a request that exceeds the model runner's limit; None: all are within."""
    if not is_second_runner:
        return lambda sampling: None
    from vllm.v1.worker.gpu.sample.logit_bias import (
        MAX_NUM_ALLOWED_TOKEN_IDS,
        MAX_NUM_LOGIT_BIAS_TOKENS,
        MAX_NUM_STOP_TOKEN_IDS,
    )

    def beyond(asked: Sampling) -> str | None:
        stops = asked.stop_token_ids if asked.min_tokens else None
        counts = {
            "allowed_token_ids": (asked.allowed_token_ids, MAX_NUM_ALLOWED_TOKEN_IDS),
            "logit_bias": (asked.logit_bias, MAX_NUM_LOGIT_BIAS_TOKENS),
            "stop_token_ids with min_tokens": (stops, MAX_NUM_STOP_TOKEN_IDS),
        }
        for key, (tokens, most) in counts.items():
            if tokens is not None and len(tokens) > most:
                return f"{key} has {len(tokens)} tokens, must have at most {most} on a GPU"
        if asked.seed is not None and asked.seed > LARGEST_SEED:
            return f"seed={asked.seed}: must be at most {LARGEST_SEED} on a GPU"
        return None

    return beyond
