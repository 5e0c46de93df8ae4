"""Which tokens stale data make a policy lose for good, and which loss keeps them: a simulation in seconds.

    python -m bench.lost_tokens [--seeds N] [--lr LR] [--json FILE] [--markdown FILE]

A policy of logits `E @ O` (48 contexts, 12 tokens, 8 features that all contexts share) answers prompts of 8 contexts;
an answer passes if it has the right token in each. As after the embedded warm start, the policy knows most contexts,
and in 16 hard ones it prefers a wrong token and has the right one with 0.3: pass@1 is 0.45. 160 steps of AdamW on 8
groups of 8 answers follow, with the objective and the group advantages of a run. Step k trains what version
max(0, k - S) has sampled, to the last token.

A context is *lost* if its right token ends below 0.1: no answer has it any more, all answers of a group fail alike, and
nothing teaches it again. `runs` counts runs that have lost one or more. `masked` is the share of the tokens with a
positive advantage in hard contexts that the corrections leave out. The arms `either sign` have the rules that
`configs/recipes/stale.yaml` and `icepop.yaml` had until 2026-11-27. At the rate of 0.12 steps are large enough
that fresh data lose contexts, too; the arms are to be compared with that.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import torch

from bench.report import options, write
from goaly.losses.objective import PolicyObjective, finish
from goaly.losses.settings import LossSettings, Rejection

CONTEXTS, TOKENS, LENGTH, FEATURES, HARD = 48, 12, 8, 8, 16
GROUPS, SIZE, STEPS, WARMUP = 8, 8, 160, 5
RIGHT, KNOWN, LOST = 0.3, 0.985, 0.1
HARD_SHARE, LR = 0.12, 0.12
BOUNDS = (0, 3, 8, 32)
RESULTS = "docs/results/lost_tokens"

REINFORCE = {"name": "reinforce", "proximal": "trainer", "importance": "sequence", "importance_cap": 2.0}
HALVED, HALVED_DOWN = (
    Rejection(measure="ratio", level="token", low=0.5, advantage=sign) for sign in ("any", "negative")
)
BAND = Rejection(measure="ratio", level="token", low=0.5, high=5.0)
ABOVE = Rejection(measure="ratio", level="token", high=5.0)
ARMS: Mapping[str, LossSettings] = {
    "grpo": LossSettings(),
    "stale, either sign": LossSettings(**REINFORCE, rejections=(HALVED,)),
    "stale": LossSettings(**REINFORCE, rejections=(HALVED_DOWN,)),
    "stale, floor": LossSettings(**REINFORCE, rejections=(HALVED_DOWN,), importance_floor_positive=1.0),
    "icepop, either sign": LossSettings(proximal="trainer", importance_cap=None, rejections=(BAND,)),
    "icepop": LossSettings(proximal="trainer", importance_cap=None, rejections=(HALVED_DOWN, ABOVE)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """Independent policies (N): logits of each token in each context, and the right tokens."""

    contexts_NKD: torch.Tensor
    tokens_NDV: torch.Tensor
    right_NK: torch.Tensor

    @property
    def logprobs_NKV(self) -> torch.Tensor:
        """The log-probability of each token in each context."""
        return (self.contexts_NKD @ self.tokens_NDV).log_softmax(-1)

    @property
    def right_probs_NK(self) -> torch.Tensor:
        """The probability of each context's right token."""
        return self.logprobs_NKV.detach().exp().gather(2, self.right_NK[..., None])[..., 0]

    @property
    def pass_at_1_N(self) -> torch.Tensor:
        """The probability that an answer passes, over 2,000 held-out prompts."""
        contexts_SL = prompts(2000, torch.Generator().manual_seed(5))
        return self.right_probs_NK[:, contexts_SL].prod(-1).mean(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The result of one run."""

    pass_at_1: float
    area: float
    """Mean training pass rate over all steps."""
    lost: int
    """Contexts whose right token is lost."""
    rising_masked: float
    """Share of the tokens with a positive advantage in hard contexts that the corrections leave out."""
    steps: Sequence[Mapping[str, float]]
    """The metrics of each step, named as those of a run."""


@cache
def warm_starts(count: int) -> Policies:
    """Policies before RL, each with right tokens and features of its own."""
    generator, every_K = torch.Generator().manual_seed(7), torch.arange(CONTEXTS)
    right_NK = torch.randint(0, TOKENS, (count, CONTEXTS), generator=generator)
    wrong_NK = (right_NK + torch.randint(1, TOKENS, right_NK.shape, generator=generator)) % TOKENS
    target_NKV = torch.full((count, CONTEXTS, TOKENS), (1 - KNOWN) / TOKENS)
    is_hard_NK = (every_K < HARD).expand(count, -1)
    target_NKV.scatter_(2, wrong_NK[..., None], torch.where(is_hard_NK, 1 - RIGHT, (1 - KNOWN) / TOKENS)[..., None])
    target_NKV.scatter_(2, right_NK[..., None], torch.where(is_hard_NK, RIGHT, KNOWN)[..., None])
    target_NKV /= target_NKV.sum(-1, keepdim=True)
    contexts_NKD = torch.randn(count, CONTEXTS, FEATURES, generator=generator).requires_grad_()
    tokens_NDV = (torch.randn(count, FEATURES, TOKENS, generator=generator) / 2).requires_grad_()
    optimizer = torch.optim.Adam([contexts_NKD, tokens_NDV], lr=0.05)
    for _ in range(600):
        optimizer.zero_grad()
        (-(target_NKV * (contexts_NKD @ tokens_NDV).log_softmax(-1)).sum()).backward()
        optimizer.step()
    return Policies(contexts_NKD=contexts_NKD.detach(), tokens_NDV=tokens_NDV.detach(), right_NK=right_NK)


def prompts(count: int, generator: torch.Generator) -> torch.Tensor:
    """The contexts of this many prompts `[count, LENGTH]`."""
    is_hard = torch.rand(count, LENGTH, generator=generator) < HARD_SHARE
    hard = torch.randint(0, HARD, is_hard.shape, generator=generator)
    return torch.where(is_hard, hard, torch.randint(HARD, CONTEXTS, is_hard.shape, generator=generator))


def sampled(policies: Policies, version: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The columns of one step's answers by this version, those of one policy after the other."""
    count = len(policies.right_NK)
    contexts_NP = prompts(count * GROUPS, generator).repeat_interleave(SIZE, 0).view(count, -1)
    every_N1 = torch.arange(count)[:, None]
    logprobs_PV = policies.logprobs_NKV.detach()[every_N1, contexts_NP].flatten(0, 1)
    drawn_P = torch.multinomial(logprobs_PV.exp(), 1, generator=generator)[:, 0]
    right_P = policies.right_NK[every_N1, contexts_NP].flatten()
    passed_GS = (drawn_P == right_P).view(-1, SIZE, LENGTH).all(-1).float()
    centred_GS = passed_GS - passed_GS.mean(1, keepdim=True)
    advantages_GS = centred_GS / (passed_GS.std(1, correction=0, keepdim=True) + 1e-6)
    return {
        "contexts": contexts_NP,
        "drawn": drawn_P,
        "passed": passed_GS.view(count, -1).mean(1),
        "sampler_logprobs": logprobs_PV.gather(1, drawn_P[:, None])[:, 0],
        "sampler_versions": torch.full_like(drawn_P, version),
        "advantages": advantages_GS.flatten().repeat_interleave(LENGTH),
        "documents": torch.arange(passed_GS.numel()).repeat_interleave(LENGTH),
    }


def learn(loss: LossSettings, max_staleness: int, seeds: int, *, lr: float = LR, steps: int = STEPS) -> list[Learned]:
    """The runs of this many policies, every token as old as the bound."""
    start, objective, generator = warm_starts(seeds), PolicyObjective(loss), torch.Generator().manual_seed(seeds)
    parameters = [start.contexts_NKD.clone().requires_grad_(), start.tokens_NDV.clone().requires_grad_()]
    policies = Policies(contexts_NKD=parameters[0], tokens_NDV=parameters[1], right_NK=start.right_NK)
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    waiting = deque(sampled(policies, 0, generator) for _ in range(max_staleness + 1))
    found: list[list[dict[str, float]]] = [[] for _ in range(seeds)]
    masked_N, rising_N = torch.zeros(seeds), torch.zeros(seeds)
    for version in range(steps):
        columns = waiting.popleft()
        current_PV = policies.logprobs_NKV[torch.arange(seeds)[:, None], columns["contexts"]].flatten(0, 1)
        entropies_P = -(current_PV.exp() * current_PV).sum(-1).detach()
        part = objective(current_PV.gather(1, columns["drawn"][:, None])[:, 0], entropies_P, columns, version)
        optimizer.zero_grad()
        (part.total / (GROUPS * SIZE * LENGTH)).backward()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norms_N = sum(gradient.square().sum((1, 2)) for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.div_(norms_N.clamp(min=1.0)[:, None, None])
        decay = 1 - 0.9 * max(0, version - WARMUP) / (steps - WARMUP)
        optimizer.param_groups[0]["lr"] = lr * min(decay, (version + 1) / WARMUP)
        optimizer.step()
        of_step = {
            "reward/mean": columns["passed"],
            "reward/pass_rate": columns["passed"],
            "grad_norm": norms_N,
            **{name: values_P.view(seeds, -1).mean(1) for name, values_P in part.mean.items()},
            **{name: values_P.view(seeds, -1).amax(1) for name, values_P in part.maximum.items()},
        }
        for number, metrics in enumerate(found):
            metrics.append(finish({name: values_N[number].item() for name, values_N in of_step.items()}))
        rising_NP = ((columns["contexts"] < HARD) & (columns["advantages"].view(seeds, -1) > 0)).float()
        rising_N += rising_NP.sum(1)
        if "rejected" in part.mean:
            masked_N += (rising_NP * part.mean["rejected"].view(seeds, -1)).sum(1)
        waiting.append(sampled(policies, version + 1, generator))
    return [
        Learned(
            pass_at_1=policies.pass_at_1_N[number].item(),
            area=fmean(step["reward/pass_rate"] for step in metrics),
            lost=int((policies.right_probs_NK[number] < LOST).sum()),
            rising_masked=(masked_N / rising_N.clamp(min=1))[number].item(),
            steps=metrics,
        )
        for number, metrics in enumerate(found)
    ]


def numbers(learned: Sequence[Learned]) -> dict[str, float]:
    """The numbers of an arm."""
    return {
        "runs": sum(run.lost > 0 for run in learned),
        "pass@1": fmean(run.pass_at_1 for run in learned),
        "least pass@1": min(run.pass_at_1 for run in learned),
        "area": fmean(run.area for run in learned),
        "masked": fmean(run.rising_masked for run in learned),
    }


def markdown(found: Mapping[str, Mapping[int, Mapping[str, float]]], seeds: int, lr: float) -> str:
    """The page of the results."""
    columns = next(iter(next(iter(found.values())).values()))
    rows = [
        f"| {arm} | {bound} | {row['runs']} | {' | '.join(f'{row[name]:.3f}' for name in columns if name != 'runs')} |"
        for arm, of_bound in found.items()
        for bound, row in of_bound.items()
    ]
    return "\n".join(
        [
            "# Tokens that stale data lose for good",
            "",
            f"    python -m bench.lost_tokens --json {RESULTS}.json --markdown {RESULTS}.md",
            "",
            (__doc__ or "").split("\n\n", 2)[2].strip(),
            "",
            f"{seeds} policies with warm starts of their own, learning rate {lr}. This is a simulation: it shows the "
            "cause, and its numbers are not those of a language model.",
            "",
            f"| loss | bound | {' | '.join(columns)} |",
            f"|{'---|' * (len(columns) + 2)}",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Run all arms, print, and write the files."""
    arguments = options(__doc__, "json", "markdown", seeds=48, lr=LR).parse_args()
    found: dict[str, dict[int, dict[str, float]]] = {arm: {} for arm in ARMS}
    for arm, loss in ARMS.items():
        for bound in BOUNDS if arm == "grpo" else BOUNDS[1:]:
            found[arm][bound] = numbers(learn(loss, bound, arguments.seeds, lr=arguments.lr))
            print(f"{arm} at {bound}: {found[arm][bound]}", flush=True)
    page = markdown(found, arguments.seeds, arguments.lr)
    print(page[page.index("| loss") :])
    result: dict[str, Any] = {"seeds": arguments.seeds, "lr": arguments.lr, "arms": found}
    write(arguments.json, result)
    write(arguments.markdown, page)


if __name__ == "__main__":
    main()
