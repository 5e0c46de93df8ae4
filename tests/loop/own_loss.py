"""A loss of a user's own, which the trainer's process finds by its path."""

from goaly.losses.tokens import LossOutput, Tokens


def squared(tokens: Tokens, *, power: float = 2.0) -> LossOutput:
    """The importance-weighted policy gradient, and one more number to report."""
    square_P = tokens.advantages_P.abs() ** power
    return LossOutput(loss_P=-tokens.ratio_P * tokens.advantages_P, mean={"advantage_square": square_P})
