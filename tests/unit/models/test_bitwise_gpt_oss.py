"""gpt-oss with bitwise numerics gives a token the same bits, whatever is computed beside it."""

from typing import Any

import pytest
import torch

from goaly.errors import ConfigError
from goaly.models.spec import prepare_torchtitan, spec_of

prepare_torchtitan()

from torchtitan.models.gpt_oss.moe import swiglu  # noqa: E402

from goaly.models.architecture import architecture  # noqa: E402
from goaly.models.attention import document_masks  # noqa: E402
from goaly.models.bitwise_gpt_oss import clamped_swiglu  # noqa: E402
from goaly.models.settings import Numerics  # noqa: E402
from goaly.models.spec import bitwise_problems  # noqa: E402
from tests.unit.models.test_bitwise import random  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16]
LENGTHS = (33, 1, 70, 16, 40)
VOCABULARY, EXPERTS, HIDDEN = 32, 4, 48
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "swiglu_limit": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "truncate": False},
}


def built(numerics: Numerics = "bitwise", dtype: torch.dtype = torch.float32) -> Any:
    """A model of two layers, one with a window, with random weights, the same with any numerics."""
    model = spec_of(architecture(CONFIG), numerics=numerics).model.build()
    with torch.no_grad():
        for seed, (name, parameter) in enumerate(model.named_parameters()):
            parameter.copy_(random(*parameter.shape, seed=seed) * 0.2 + ("norm" in name))
    return model.to(dtype)


def logits(model: Any, tokens: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return model(tokens[None], positions=positions, attention_masks=document_masks(model, positions))[0]


def drawn() -> torch.Tensor:
    return torch.randint(VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_a_document_has_the_same_logits_alone_as_beside_others(dtype: torch.dtype):  # BA-1 BG-1 BW-1
    model, tokens = built(dtype=dtype), drawn()
    packed = logits(model, tokens, LENGTHS)
    for document, expected in zip(tokens.split(LENGTHS), packed.split(LENGTHS), strict=True):
        assert torch.equal(logits(model, document, (len(document),)), expected)


def test_the_model_has_values_and_gradients_of_the_ordinary_one():
    tokens, upstream, found = drawn(), random(sum(LENGTHS), VOCABULARY, seed=9), []
    for numerics in ("fast", "bitwise"):
        model = built(numerics)
        out = logits(model, tokens, LENGTHS)
        out.backward(upstream)
        found.append({"logits": out} | {name: parameter.grad for name, parameter in model.named_parameters()})
    plain, mine = found
    assert mine.keys() == plain.keys()
    for name, expected in plain.items():
        assert bool(expected.any())
        torch.testing.assert_close(
            mine[name], expected, atol=3e-5 * float(expected.detach().abs().max()), rtol=1e-4, msg=name
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_clamped_activation_is_the_same_in_any_place(threads: int, dtype: torch.dtype):  # BW-3
    both = 3 * random(400, 200).to(dtype)
    whole = clamped_swiglu(both, 2.0)
    for count in (1, 3, 7, 400):
        assert torch.equal(torch.cat([clamped_swiglu(some, 2.0) for some in both.split(count)]), whole)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(whole, swiglu(both, limit=2.0), atol=tolerance, rtol=1e-2)


def test_it_is_refused_on_gpus_only(monkeypatch: pytest.MonkeyPatch):
    shape = architecture(CONFIG)
    assert list(bitwise_problems(shape, "cpu")) == []
    (problem,) = bitwise_problems(shape, "cuda")
    assert problem.startswith("must be fast for gpt-oss on GPUs: the attention kernel")
    monkeypatch.setattr("goaly.models.spec.bitwise_problems", lambda *_: [problem])
    with pytest.raises(ConfigError, match=r"model\.numerics=bitwise: must be fast for gpt-oss on GPUs"):
        spec_of(shape, numerics="bitwise")


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_ranks_that_divide_the_experts_or_their_features_add_up_to_what_one_computes(dtype: torch.dtype):  # BG-1 BE-2
    rows = (5, 0, 33, 12)
    x_RD = random(sum(rows), 96, seed=9).to(dtype)
    every, first, second = slice(None), slice(EXPERTS // 2), slice(EXPERTS // 2, None)

    def of_rank(experts: slice, hidden: slice, x_RD: torch.Tensor) -> torch.Tensor:
        """What a rank with these experts and hidden features computes."""
        inner = built(dtype=dtype).layers["0"].moe.routed_experts.inner_experts
        both = slice(*(None if place is None else 2 * place for place in (hidden.start, hidden.stop)))
        parts = {
            "mlp1_weight_EGD": (experts, both),
            "mlp1_bias_EG": (experts, both),
            "mlp2_weight_EDF": (experts, every, hidden),
            "mlp2_bias_ED": (experts,),
        }
        for name, part in parts.items():
            setattr(inner, name, torch.nn.Parameter(getattr(inner, name)[part].contiguous()))
        return inner(x_RD, torch.tensor(rows)[experts])

    whole_RG = of_rank(every, every, x_RD)
    halves = [of_rank(every, half, x_RD) for half in (slice(HIDDEN // 2), slice(HIDDEN // 2, None))]
    assert torch.equal(torch.cat(halves, 1), whole_RG)
    of_experts = [of_rank(half, every, part) for half, part in zip((first, second), x_RD.split([5, 45]), strict=True)]
    assert torch.equal(torch.cat(of_experts), whole_RG)
