"""Answers that were drawn under a form, by enumeration of all answers over a small vocabulary."""

from itertools import product

import pytest
import torch
from torch import Tensor

from goaly.losses.objective import PolicyObjective
from goaly.losses.policy_losses import LOSSES
from goaly.losses.settings import LossSettings, Rejection

close = torch.testing.assert_close
WORDS, LENGTH = 3, 3
PREFIXES = {
    prefix: place for place, prefix in enumerate(p for n in range(LENGTH) for p in product(range(WORDS), repeat=n))
}
DRIFT = 1.5
"""What the current policy adds to the log-prob of a token that the form forces."""

CORRECTIONS = {
    "none": {},
    "token": {"proximal": "trainer"},
    "sequence": {"proximal": "trainer", "importance": "sequence"},
    "geometric": {"proximal": "trainer", "importance": "geometric"},
    "interpolated": {"proximal": "interpolated", "importance": "geometric"},
}
BOUNDS = {"ratio": (0.5, 2.0), "log_ratio": (-0.7, 0.7), "k1": (-0.7, 0.7), "k2": (None, 0.3), "k3": (None, 0.3)}
LEVELS = ("sequence", "sequence_sum", "veto")
REJECTIONS = [
    Rejection(measure=measure, level=level, low=low, high=high, policy="current")
    for measure, (low, high) in (BOUNDS | {"binary_kl": (None, 0.3)}).items()
    for level in LEVELS
]


def settings_of(name: str, correction: str, rules: tuple[Rejection, ...] = ()) -> LossSettings | None:
    """The loss with the correction, summed over tokens; None where the settings refuse it."""
    settings = LossSettings(
        name=name, aggregation="sequence_sum", constant_length=1, rejections=rules, **CORRECTIONS[correction]
    )
    return None if settings.problems("loss.") else settings


COMBINATIONS = [
    (name, correction) for name in LOSSES.names for correction in CORRECTIONS if settings_of(name, correction)
]

DRIFTS = [(name, correction, None) for name, correction in COMBINATIONS] + [
    (name, correction, rule)
    for name, correction in (("gspo", "sequence"), ("reinforce", "none"))
    for rule in range(len(REJECTIONS))
]


class Language:
    """A sampler over answers of three words, a form, and an advantage for each answer."""

    def __init__(self, seed: int, *, forced_logit: float = 0.0, partial: bool = True):
        random = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(len(PREFIXES), WORDS, generator=random, dtype=torch.float64)
        self.advantages = torch.randn(*[WORDS] * LENGTH, generator=random, dtype=torch.float64)
        self.allowed = torch.ones(len(PREFIXES), WORDS, dtype=torch.float64)
        for prefix, place in PREFIXES.items():
            if len(prefix) == 1:  # the form leaves no choice, where the policy prefers another word
                self.allowed[place] = torch.nn.functional.one_hot(torch.tensor(prefix[0]), WORDS)
                self.logits[place, prefix[0]] = forced_logit
            if len(prefix) == 2 and partial:  # two of three words
                self.allowed[place, sum(prefix) % WORDS] = 0

    def answers(self, logits: Tensor) -> list[tuple[list[int], list[int], float, Tensor]]:
        """Each answer that the form allows: its words, its prefixes, its probability and weights under these logits."""
        found = []
        free = logits.softmax(-1)
        mass = (free * self.allowed).sum(-1)
        for words in product(range(WORDS), repeat=LENGTH):
            places = [PREFIXES[words[:n]] for n in range(LENGTH)]
            drawn = self.allowed[places, words] * free[places, words] / mass[places]
            if drawn.prod() > 0:
                found.append((list(words), places, float(drawn.prod()), mass[places]))
        return found

    def gradient(self, settings: LossSettings, current: Tensor) -> Tensor:
        """The loss's expected gradient by the current logits, over answers that the sampler drew under the form."""
        logits = current.clone().requires_grad_()
        free, sampled = logits.log_softmax(-1), self.logits.log_softmax(-1)
        answers = self.answers(self.logits)
        total = logits.sum() * 0
        for words, places, probability, mass in answers:
            columns = {
                "sampler_logprobs": sampled[places, words],
                "sampler_versions": torch.zeros(LENGTH, dtype=torch.int32),
                "advantages": self.advantages[tuple(words)].expand(LENGTH),
                "documents": torch.zeros(LENGTH, dtype=torch.int64),
                "form_weights": mass,
            }
            part = PolicyObjective(settings)(free[places, words], torch.zeros(LENGTH), columns, 1)
            total = total + probability * part.total
        return torch.autograd.grad(total, logits)[0]

    def expected(self, policy: Tensor) -> Tensor:
        """-A times the gradient of the policy's own probabilities among the words that the form allows, at each state
        that the policy reaches under the form."""
        logits = policy.clone().requires_grad_()
        free, reached = logits.softmax(-1), torch.zeros(len(PREFIXES), WORDS, dtype=torch.float64)
        for words, places, probability, _ in self.answers(policy):
            for place, word in zip(
                places, words, strict=True
            ):  # how often it comes there, times the advantage from there on
                reached[place, word] += probability * self.advantages[tuple(words)]
        mass = (free.detach() * self.allowed).sum(-1, keepdim=True)
        after = reached * mass / free.detach()  # reached had the probability under the form of this word
        return torch.autograd.grad(-(after * free * self.allowed).sum(), logits)[0]


@pytest.mark.parametrize(("name", "correction"), COMBINATIONS)
def test_every_loss_has_the_policys_own_expected_gradient_among_what_a_form_allows(name: str, correction: str):
    language = Language(seed=1)
    settings = settings_of(name, correction)
    assert settings is not None
    close(language.gradient(settings, language.logits), language.expected(language.logits))


@pytest.mark.parametrize("forced_logit", [-14.0, -3.0])
def test_weights_of_whole_answers_are_exact_where_a_form_leaves_every_choice_or_none(forced_logit: float):
    language = Language(seed=2, forced_logit=forced_logit, partial=False)
    random = torch.Generator().manual_seed(3)
    current = language.logits + 0.5 * torch.randn(language.logits.shape, generator=random, dtype=torch.float64)
    settings = LossSettings(
        name="reinforce",
        proximal="trainer",
        importance="sequence",
        importance_cap=None,
        aggregation="sequence_sum",
        constant_length=1,
    )
    found, expected = language.gradient(settings, current), language.expected(current)
    likely = float(language.answers(language.logits)[0][3].min())  # of the forced words
    close(found, expected, atol=3 * likely, rtol=0.02)


@pytest.mark.parametrize(("name", "correction", "rule"), DRIFTS)
def test_a_forced_token_that_drifts_changes_nothing_for_the_free_ones(name: str, correction: str, rule: int | None):
    settings = settings_of(name, correction, () if rule is None else (REJECTIONS[rule],))
    assert settings is not None
    sampled, current = torch.tensor([0.5, 1e-6, 0.4, 1e-6]).log(), torch.tensor([0.55, 1e-6, 0.36, 1e-6]).log()

    def gradient(tokens: list[int], drift: float) -> Tensor:
        now = current.clone()
        now[[1, 3]] += drift
        now = now[tokens].requires_grad_()
        columns = {
            "sampler_logprobs": sampled[tokens],
            "sampler_versions": torch.zeros(len(tokens), dtype=torch.int32),
            "advantages": torch.ones(len(tokens)),
            "documents": torch.zeros(len(tokens), dtype=torch.int64),
            "proximal_logprobs": now.detach(),
            "form_weights": torch.tensor([1.0, 1e-6, 1.0, 1e-6])[tokens],
        }
        return torch.autograd.grad(PolicyObjective(settings)(now, torch.zeros(len(tokens)), columns, 1).total, now)[0]

    alone = gradient([0, 2], 0.0)
    assert (alone != 0).all()
    for drift in (-DRIFT, 0.0, DRIFT):
        found = gradient([0, 1, 2, 3], drift)
        close(found[[0, 2]], alone, atol=1e-5, rtol=1e-5)
        assert found[[1, 3]].abs().max() < 1e-4


@pytest.mark.parametrize("weights", [[0.3], [0.2, 0.1], [0.0, 0.0]])
@pytest.mark.parametrize(("name", "correction"), COMBINATIONS)
def test_an_answer_counts_by_its_weights_where_they_add_up_to_less_than_a_token(
    name: str, correction: str, weights: list[float]
):
    settings = settings_of(name, correction)
    assert settings is not None
    logprobs = torch.full((len(weights),), -0.5, requires_grad=True)
    columns = {
        "sampler_logprobs": logprobs.detach(),
        "sampler_versions": torch.zeros(len(weights), dtype=torch.int32),
        "advantages": torch.ones(len(weights)),
        "documents": torch.zeros(len(weights), dtype=torch.int64),
        "form_weights": torch.tensor(weights),
    }
    part = PolicyObjective(settings)(logprobs, torch.zeros(len(weights)), columns, 1)
    close(torch.autograd.grad(part.total, logprobs)[0], -torch.tensor(weights))
    assert all(value.isfinite().all() for value in part.mean.values())
