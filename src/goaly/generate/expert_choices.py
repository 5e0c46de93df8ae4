"""The experts that the sampler chooses for each token, for runs that replay them. Only processes with vLLM import it.

A request does not compute all of its tokens itself, because vLLM shares the blocks of equal prefixes; and some it
computes twice, after a preemption or a weight update. So each pass writes its choices where the keys and values of its
tokens go: `ChoiceCache` has a row for each slot of the key-value cache. `ChoiceRecorder` reads a request's rows once,
when vLLM frees its blocks: at its end or preemption, or at an update that computes its cache again.

Shape suffixes: S slots, T tokens, N layers, K experts of a token.

    generate-7: The recorded choices of a token are those of the pass that computed it first: its log-prob was sampled
        with them, however often the token is computed again. A prompt counts once it is whole: nothing was sampled with
        the parts of one that an update or a preemption has computed from the start.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context

RECORDS_CHOICES = "records_expert_choices"
"""The key of vLLM's `additional_config` that makes the model have a `ChoiceCache`."""


class ChoiceCache:
    """The choices of the token in each slot of the key-value cache.

    No shape depends on the routing, and the memory stays where it is, so that CUDA graphs can contain `write`.
    """

    def __init__(self, layers: Sequence[Any], config: VllmConfig):
        """`layers` are the decoder's mixtures of experts."""
        self._config = config.cache_config
        self._step: list[torch.Tensor] = []
        self._choices_SNK = torch.empty(0, len(layers), layers[0].router.top_k, dtype=torch.uint8)
        for layer in layers:
            layer.router.register_forward_hook(self._remember)

    def write(self, tokens: int) -> None:
        """Store the choices of the pass that the model has just computed; what comes after its tokens is padding."""
        step, self._step = self._step, []
        slots = get_forward_context().slot_mapping
        if not slots:  # vLLM measures memory, before it has a key-value cache
            return
        assert isinstance(slots, dict), "vLLM divides no batch into two here"
        choices_TNK = torch.cat(step)[:, :tokens].transpose(0, 1).to(torch.uint8)
        blocks, block = self._config.num_gpu_blocks, self._config.block_size
        assert blocks is not None
        if len(self._choices_SNK) <= blocks * block:  # in the first pass
            shape = (blocks * block + 1, *choices_TNK.shape[1:])  # padding has slot -1: the last row
            self._choices_SNK = torch.zeros(shape, dtype=torch.uint8, device=choices_TNK.device)
        self._choices_SNK[next(iter(slots.values()))] = choices_TNK

    def read(self, blocks: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """The choices of the tokens `[start, stop)` of a request that has these blocks."""
        place_T = torch.arange(start, stop)
        slots_T = torch.tensor(blocks)[place_T // self._config.block_size] * self._config.block_size
        slots_T += place_T % self._config.block_size
        return self._choices_SNK[slots_T.to(self._choices_SNK.device)].cpu()

    def _remember(self, router: Any, inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
        self._step.append(outputs[1])


class ChoiceRecorder:
    """The choices of requests, from their start until they are taken."""

    def __init__(self, scheduler: Any, cache: ChoiceCache):
        """`scheduler` is vLLM's."""
        self._scheduler, self._cache = scheduler, cache
        copies_parts = scheduler.kv_cache_manager.coordinator.enable_partial_hash_hits
        assert not copies_parts, "vLLM would copy tokens to another block, and their choices would stay behind"
        self._recorded: dict[str, list[torch.Tensor]] = {}
        self._free = scheduler.kv_cache_manager.free
        scheduler.kv_cache_manager.free = self._read_and_free

    def begin(self, key: str) -> None:
        """Record the choices of the request that vLLM knows by this key."""
        self._recorded[key] = [self._cache.read([0], 0, 0)]

    def take(self, key: str) -> torch.Tensor:
        """The choices `[T, N, K]` of all tokens of the request that were computed; its recording ends."""
        request = self._scheduler.requests.get(key)
        if request is not None:  # it has not ended
            self._read(request)
        return torch.cat(self._recorded.pop(key))

    def _read_and_free(self, request: Any) -> None:
        self._read(request)
        self._free(request)

    def _read(self, request: Any) -> None:
        """Add the choices of the tokens that were computed and not recorded before (generate-7)."""
        recorded = self._recorded.get(request.request_id)
        start, stop = sum(map(len, recorded or ())), request.num_computed_tokens
        if recorded is None or stop < request.num_prompt_tokens:  # they were taken, or nothing was sampled with them
            return
        if start < stop:
            (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
            recorded.append(self._cache.read(blocks, start, stop))
