"""Rewards that a random policy gets in varying amounts, so that every step has a signal."""

from goaly.prompts.prompt import Prompt


def share_of_digits(prompt: Prompt, response: str) -> float:
    """How much of the response is digits."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


def always_right(prompt: Prompt, response: str) -> float:
    """Full marks, so that a score tells who judged."""
    return 1.0
