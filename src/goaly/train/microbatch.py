"""From packed rows to the model's input: one sequence of tokens without the unused end of each row. Pure.

Trained tokens, the tokens before them in their documents, and their columns are unchanged and in order. Tokens after
the last trained token of a row are dropped: no trained token depends on them. Exactly the tokens before the last
trained one of their document are marked as those whose choices of experts are replayed: the sampler has computed them
all, and no trained token depends on others. Parts whose places are disjoint and cover T have each trained token once,
with its columns.

Shape suffixes: R rows, L their length, T tokens of a pass, P trained ones, D documents, N layers, K experts of a token.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from goaly.trajectory import EXPERT_CHOICES, TensorDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """The tokens `[1, T]` of several rows, concatenated, and the P trained tokens among them."""

    tokens_1T: Tensor
    positions_1T: Tensor
    predicting_P: Tensor
    """Index in T of the token whose hidden state predicts each trained token."""
    targets_P: Tensor
    cells_P: Tensor
    """Index of each trained token in the flattened rows."""
    columns: dict[str, Tensor]
    """The batch's columns at the trained tokens."""
    choices_1TNK: Tensor | None = None
    """The sampler's choices of experts, if the batch has them."""
    replayed_1T: Tensor | None = None
    """Marks the tokens whose choices are replayed."""

    def part(self, places: Tensor) -> tuple["Microbatch", Tensor]:
        """The tokens at these places of T, with the trained tokens that they predict; and the places of these in P."""
        place_T = torch.full_like(self.tokens_1T[0], -1).index_copy_(0, places, torch.arange(len(places)).to(places))
        own = (place_T[self.predicting_P] >= 0).nonzero().flatten()
        part = Microbatch(
            tokens_1T=self.tokens_1T[:, places],
            positions_1T=self.positions_1T[:, places],
            predicting_P=place_T[self.predicting_P[own]],
            targets_P=self.targets_P[own],
            cells_P=self.cells_P[own],
            columns={key: column[own] for key, column in self.columns.items()},
            choices_1TNK=None if self.choices_1TNK is None else self.choices_1TNK[:, places],
            replayed_1T=None if self.replayed_1T is None else self.replayed_1T[:, places],
        )
        return part, own

    def to(self, device: torch.device) -> "Microbatch":
        """The microbatch on this device."""
        if device.type == "cpu":
            return self

        def moved(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: column.to(device) for key, column in value.items()}
            return None if value is None else value.to(device)

        return Microbatch(**{field.name: moved(getattr(self, field.name)) for field in fields(self)})


NOT_A_COLUMN = ("tokens", "positions", "trained", EXPERT_CHOICES)


def microbatch(rows: TensorDict, *, multiple_of: int = 1) -> Microbatch:
    """Concatenate rows `[R, L]` without their unused ends, padded so that T is a positive multiple of `multiple_of`."""
    row_length = rows.batch_size[1]
    trained_RL = rows["trained"]
    cells_P = trained_RL.flatten().nonzero().flatten()
    place_L = torch.arange(1, row_length + 1)
    used_R = (trained_RL * place_L).amax(1)
    kept = (place_L <= used_R[:, None]).flatten()
    tokens = int(used_R.sum())
    first_R = torch.cumsum(used_R, 0) - used_R
    row_P = cells_P // row_length
    at_P = first_R[row_P] + cells_P - row_P * row_length
    tokens_T, positions_T = rows["tokens"].flatten()[kept], rows["positions"].flatten()[kept]
    short = max(-(-tokens // multiple_of), 1) * multiple_of - tokens
    if short:
        tokens_T = torch.cat([tokens_T, tokens_T.new_zeros(short)])
        longest = int(positions_T.max()) + 1 if tokens else 1  # the model may have no later positions
        positions_T = torch.cat([positions_T, torch.arange(short) % longest])
    columns = {key: rows[key].flatten(0, 1)[cells_P] for key in rows.keys() if key not in NOT_A_COLUMN}  # noqa: SIM118
    documents_T = (positions_T == 0).cumsum(0) - 1
    columns["documents"] = documents_T[at_P]
    choices_1TNK = replayed_1T = None
    if EXPERT_CHOICES in rows.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
        choices_TNK = rows[EXPERT_CHOICES].flatten(0, 1)[kept]
        choices_1TNK = torch.cat([choices_TNK, choices_TNK.new_zeros(short, *choices_TNK.shape[1:])])[None]
        last_D = torch.zeros(len(positions_T), dtype=torch.int64).scatter_reduce_(0, documents_T[at_P], at_P, "amax")
        replayed_1T = (torch.arange(len(positions_T)) < last_D[documents_T])[None]
    return Microbatch(
        tokens_1T=tokens_T[None],
        positions_1T=positions_T[None],
        predicting_P=at_P - 1,
        targets_P=tokens_T[at_P],
        cells_P=cells_P,
        columns=columns,  # pyrefly: ignore[bad-argument-type]
        choices_1TNK=choices_1TNK,
        replayed_1T=replayed_1T,
    )
