"""The search in a sampler with a broken operation: `python -m tests.actors.broken_sampler SIDE OPERATION FOLDER`.

Of a `sampler` it is broken always. With `decoding` it is broken in passes of at most 8 tokens, to which vLLM pads one,
and with `parts` in passes of at most 40.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from goaly.generate import sampler_search
from goaly.run.ranks import in_ranks

MOST = {"sampler": None, "decoding": 8, "parts": 40}


def break_module(model: Any, operation: str, *, by_length: bool, most: int | None = None) -> None:
    """Let this module's output be a little too large: always, by the number of tokens that it computes, or if these are
    at most so `most`."""
    module = model.get_submodule(operation)
    plain = module.forward

    def broken(x: Any, *rest: Any) -> Any:
        outputs = plain(x, *rest)
        if most is not None and x.shape[1] > most:
            return outputs
        factor = 1 + 1e-4 * (x.shape[1] if by_length else 1)
        return tuple(one * factor for one in outputs) if isinstance(outputs, tuple) else outputs * factor

    module.forward = broken


def break_sampler(side: str, operation: str) -> None:
    """Break this operation of every sampler that this process builds."""
    from goaly.generate.vllm_model import TorchtitanForCausalLM

    build: Any = TorchtitanForCausalLM.__init__

    @functools.wraps(build)
    def build_broken(self: Any, *given: Any, **named: Any) -> None:
        build(self, *given, **named)
        break_module(self.model, operation, by_length=False, most=MOST[side])

    TorchtitanForCausalLM.__init__ = build_broken


def in_broken_rank(rank: int, side: str, operation: str, work: Callable[..., None], *arguments: Any) -> None:
    """Do the work of a rank of such a sampler."""
    break_sampler(side, operation)
    work(rank, *arguments)


def search(side: str, operation: str, folder: str) -> None:
    """Search in such a sampler."""
    sampler_search.in_ranks = lambda work, ranks, arguments: in_ranks(
        in_broken_rank, ranks, (side, operation, work, *arguments)
    )
    sampler_search.main([folder])


if __name__ == "__main__":
    search(*sys.argv[1:])
