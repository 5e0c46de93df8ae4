"""What transformers says of samples, and checks of samples with it."""

from pathlib import Path

import torch

from goaly.generate.request import Sample
from tests.actors.engines_in_child import GREEDY, PROMPTS, scale_of

NOISE = 2e-4


class Expected:
    """The log-probs that transformers gives to what was sampled, with the weights of one of the folders."""

    def __init__(self, folders: list[Path]):
        from transformers import AutoModelForCausalLM

        self._models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in folders]

    @torch.no_grad()
    def logits(self, prompt: list[int], sample: Sample, which: int = 0) -> torch.Tensor:
        """Those `[N, V]` that the answer's tokens were drawn from."""
        tokens = torch.tensor([[*prompt, *sample.tokens.tolist()]])
        return self._models[which](tokens).logits[0, len(prompt) - 1 : -1]

    def logprobs(
        self, prompt: list[int], sample: Sample, which: int = 0, temperature: float | torch.Tensor = 1.0
    ) -> torch.Tensor:
        """Those of the answer's tokens."""
        logits_NV = self.logits(prompt, sample, which) / temperature
        return logits_NV.log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]

    def scaled(self, prompt: list[int], sample: Sample, versions: torch.Tensor) -> torch.Tensor:
        """Those of the answer's tokens, each with the weights that `load_scaled` makes of its version."""
        return self.logprobs(prompt, sample, 0, 1 / scale_of(versions)[:, None])

    @torch.no_grad()
    def greedy(self, prompt: list[int]) -> list[int]:
        """The likeliest answer."""
        out = self._models[0].generate(
            torch.tensor([prompt]), max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None
        )
        return out[0, len(prompt) :].tolist()

    def check(self, samples: list[Sample], which: int, version: int, *, close: bool = True) -> None:
        """The tokens of this version have (or, not close, have not) the log-probs of the folder's weights."""
        for prompt, sample in zip(PROMPTS, samples, strict=False):
            of_version = sample.versions == version
            error = (sample.logprobs - self.logprobs(prompt, sample, which))[of_version].abs().max()
            assert bool(error < NOISE) is close, f"{error:.6f}"

    def check_each_stamp(self, samples: list[Sample]) -> None:
        """Each token has the log-prob that the weights of its version give it, and not that of the next or the last
        version's."""
        for number, sample in enumerate(samples):
            prompt, versions = PROMPTS[number % len(PROMPTS)], sample.versions
            torch.testing.assert_close(sample.logprobs, self.scaled(prompt, sample, versions), atol=NOISE, rtol=0)
            for other in (versions - 1, versions + 1):
                unlike = (sample.logprobs - self.scaled(prompt, sample, other)).abs() > NOISE
                assert unlike.float().mean() > 0.9


def versions_of(samples: list[Sample]) -> set[tuple[tuple[int, int], ...]]:
    """How many tokens of each version, for all samples."""
    return {
        tuple((int(version), int((sample.versions == version).sum())) for version in sample.versions.unique())
        for sample in samples
    }
