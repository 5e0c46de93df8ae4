"""The log-probs that tokens of answers with a form would have without it.

Consumes the logits of vLLM's steps, on every rank, before a grammar masks them.

The log-prob is the one that the trainer computes: over all tokens, at the request's temperature.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch


class FreeLogprobs:
    """Keeps the logits of answers with a form until the tokens that were drawn from them are read."""

    def __init__(self, engine_core: Any):
        """`engine_core` is vLLM's."""
        self._launched: dict[int, tuple[list[str], torch.Tensor]] = {}
        """The requests of steps that were launched and not read, and their rows."""
        self._read: tuple[list[str], torch.Tensor] | None = None
        self._step: Any = None
        """The step that is launched now."""
        self._runner = runner = engine_core.model_executor.driver_worker.worker.model_runner
        self._log_softmax = getattr(runner.sampler, "compute_logprobs", partial(torch.log_softmax, dim=-1))
        self._execute, runner.execute_model = runner.execute_model, self._launch
        if hasattr(runner, "structured_outputs_worker"):  # vLLM's second model runner, which exists on GPUs
            masks = runner.structured_outputs_worker
            self._mask, masks.apply_grammar_bitmask = masks.apply_grammar_bitmask, self._keep_and_mask
        else:
            self._sample, runner.sample_tokens = runner.sample_tokens, self._keep_and_sample
        scheduler = engine_core.scheduler
        self._update, scheduler.update_from_output = scheduler.update_from_output, self._read_step

    def of(self, outputs: Sequence[Any], temperature: Callable[[str], float | None]) -> dict[str, float]:
        """The log-probs of the tokens in vLLM's outputs of the step that was read last, by request; none where no form
        was in force."""
        if self._read is None:
            return {}
        (requests, rows_RV), self._read = self._read, None
        drawn = {one.request_id: one.new_token_ids[0] for one in outputs if one.new_token_ids}
        divisors_R = rows_RV.new_tensor([(one in drawn and temperature(one)) or 1.0 for one in requests])
        rows_RV = rows_RV / divisors_R[:, None]  # a GPU would multiply by a number's reciprocal
        logprobs_RV = self._log_softmax(rows_RV)
        tokens_R = torch.tensor([drawn.get(request, 0) for request in requests], device=rows_RV.device)
        logprobs_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0].tolist()
        return {one: logprob for one, logprob in zip(requests, logprobs_R, strict=True) if one in drawn}

    def _launch(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        self._step = step
        return self._execute(step, *args, **kwargs)

    def _keep_and_sample(self, grammar_output: Any) -> Any:
        if grammar_output is not None and self._runner.execute_model_state is not None:
            self._keep(
                self._runner.execute_model_state[1],
                self._runner.input_batch.req_ids,
                grammar_output.structured_output_request_ids,
            )
        return self._sample(grammar_output)

    def _keep_and_mask(self, logits: torch.Tensor, batch: Any, with_form: Sequence[str], *args: Any) -> Any:
        self._keep(logits, batch.req_ids, with_form)
        return self._mask(logits, batch, with_form, *args)

    def _keep(self, logits_RV: torch.Tensor, requests: Sequence[str], with_form: Sequence[str]) -> None:
        places = {request: place for place, request in enumerate(requests)}
        known = [request for request in with_form if request in places]
        if not known:
            return
        rows_RV = logits_RV[[places[request] for request in known]].float()  # a copy
        self._launched[id(self._step)] = known, rows_RV

    def _read_step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        self._read = self._launched.pop(id(step), None)
        return self._update(step, *args, **kwargs)
