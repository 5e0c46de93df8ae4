"""Chunked log-probs equal whole ones, in value and gradient, and never hold more logits than a chunk."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from goaly.models.device import prepare_torchtitan
from goaly.train.logprob_head import LogprobHead

prepare_torchtitan()


def head(vocabulary: int, width: int, seed: int = 0) -> LogprobHead:
    made = LogprobHead.Config(in_features=width, out_features=vocabulary).build()
    with torch.no_grad():
        made.weight.normal_(generator=torch.Generator().manual_seed(seed))
    return made


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(0, 40),
    chunk=st.integers(1, 50),
    vocabulary=st.integers(1, 30),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
)
def test_values_and_gradients_are_those_of_a_plain_log_softmax(
    tokens: int, chunk: int, vocabulary: int, temperature: float
):
    generator = torch.Generator().manual_seed(tokens + 100 * chunk)
    hidden = torch.randn(1, tokens + 5, 8, generator=generator, requires_grad=True)
    predicting = torch.randperm(tokens + 5, generator=generator)[:tokens]
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    weights = torch.randn(2, tokens, generator=generator)
    made = head(vocabulary, 8)

    logprobs, entropies = made(hidden, predicting, targets, chunk, temperature)
    (weights[0] * logprobs + weights[1] * entropies).sum().backward()
    ours = logprobs.detach(), entropies.detach(), hidden.grad.clone(), made.weight.grad.clone()
    hidden.grad = made.weight.grad = None

    full = (hidden[0][predicting] @ made.weight.t() / temperature).log_softmax(-1)
    logprobs, entropies = full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(1)
    (weights[0] * logprobs + weights[1] * entropies).sum().backward()
    for mine, plain in zip(ours, (logprobs, entropies, hidden.grad, made.weight.grad), strict=True):
        torch.testing.assert_close(mine, plain.detach(), atol=2e-5, rtol=1e-4)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tensor_of_all_tokens_times_the_vocabulary_exists(with_entropy: bool):
    tokens, vocabulary, width, chunk = 512, 300, 4, 32
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    with LargestTensor() as seen:
        logprobs, entropies = head(vocabulary, width)(
            hidden, torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64), chunk, 1.0
        )
        (logprobs.sum() + (entropies.sum() if with_entropy else 0)).backward()
    assert seen.elements <= chunk * vocabulary


def test_in_bfloat16_on_a_cpu_only_the_gradients_are_rounded_and_once():
    tokens, vocabulary, width = 400, 300, 64
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, width, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    made = head(vocabulary, width).bfloat16()
    with torch.no_grad():
        made.weight.mul_(0.5)  # logits deviate by 4
    upstream = torch.randn(2, tokens, generator=generator)

    def results(logprobs: torch.Tensor, entropies: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = (upstream[0] * logprobs).sum() + (upstream[1] * entropies).sum()
        return logprobs.detach(), entropies.detach(), *torch.autograd.grad(total, of)

    ours = results(*made(hidden, torch.arange(tokens), targets, 16, 1.0), hidden, made.weight)
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden[0], made.weight))
    full = (exact_hidden @ exact_weight.t()).log_softmax(-1)
    exact = results(full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(1), exact_hidden, exact_weight)
    assert ours[0].dtype == ours[1].dtype == torch.float32
    for mine, true in zip(ours[:2], exact[:2], strict=True):
        torch.testing.assert_close(mine.double(), true, atol=1e-4, rtol=1e-5)
    for mine, true in zip(ours[2:], exact[2:], strict=True):
        torch.testing.assert_close(mine.double().view_as(true), true, atol=1e-4, rtol=2**-8)


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.integers(1, 30),
    chunk=st.integers(1, 40),
    vocabulary=st.integers(4, 30),
    temperature=st.sampled_from([1.0, 0.7]),
    top_k=st.integers(1, 4),
)
def test_a_teachers_top_tokens_have_the_log_probs_and_gradients_of_a_plain_log_softmax(
    tokens: int, chunk: int, vocabulary: int, temperature: float, top_k: int
):
    generator = torch.Generator().manual_seed(tokens + 100 * chunk)
    teacher, made = head(vocabulary, 8, seed=1), head(vocabulary, 8)
    hidden = torch.randn(1, tokens, 8, generator=generator, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    where = torch.arange(tokens)
    given = where, targets, chunk, temperature
    logprobs, entropies, top, top_logprobs = teacher(hidden, *given, top_k=top_k)
    torch.testing.assert_close((logprobs, entropies), teacher(hidden, *given), atol=0, rtol=0)
    full = (hidden[0] @ teacher.weight.t() / temperature).log_softmax(-1)
    torch.testing.assert_close(top_logprobs, full.topk(top_k, -1).values.detach(), atol=2e-5, rtol=1e-4)
    assert not top_logprobs.requires_grad

    weights = torch.randn(tokens, 2 + top_k, generator=generator)
    others = top.long()
    logprobs, entropies, of_top = made(hidden, *given, others_PK=others)
    torch.testing.assert_close((logprobs, entropies), made(hidden, *given), atol=0, rtol=0)

    def results(logprobs, entropies, of_top):
        total = (weights * torch.cat([logprobs[:, None], entropies[:, None], of_top], 1)).sum()
        return logprobs.detach(), of_top.detach(), *torch.autograd.grad(total, (hidden, made.weight))

    ours = results(logprobs, entropies, of_top)
    full = (hidden[0] @ made.weight.t() / temperature).log_softmax(-1)
    plain = results(full.gather(1, targets[:, None])[:, 0], -(full.exp() * full).sum(1), full.gather(1, others))
    for mine, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, expected, atol=2e-5, rtol=1e-4)


def test_no_tensor_of_all_tokens_times_the_vocabulary_exists_for_a_teacher_and_its_student():
    tokens, vocabulary, width, chunk, top_k = 512, 300, 4, 32, 8
    hidden = torch.randn(1, tokens, width, requires_grad=True)
    given = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int64), chunk, 1.0
    with LargestTensor() as seen:
        *_, top, _ = head(vocabulary, width)(hidden, *given, top_k=top_k)
        *_, of_top = head(vocabulary, width)(hidden, *given, others_PK=top.long())
        of_top.sum().backward()
    assert seen.elements <= chunk * vocabulary
