"""What the models and train stages rely on in torchtitan 0.3; each test says what a change there means for us."""

from pathlib import Path

import pytest
import torch
from random_model import native_tensors

from goaly.models.attention import document_masks
from goaly.models.definition import model_spec
from goaly.models.device import prepare_torchtitan

prepare_torchtitan()


def test_inner_attention_has_no_backward_pass_on_the_cpu(tiny_model_folder: Path):
    """Once this fails, `PackedAttention` may give way to torchtitan's own attention, if that is as fast."""
    from torchtitan.models.common.attention import VarlenAttention

    spec = model_spec(tiny_model_folder, attention=VarlenAttention.Config())
    model = spec.model.build()
    model.load_state_dict(native_tensors(spec, tiny_model_folder), strict=False)
    positions = torch.arange(8)[None]
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(positions, positions=positions, attention_masks=document_masks(model, positions)).sum().backward()


def test_parameters_have_fused_names_and_the_state_dict_split_ones(tiny_model_folder: Path):
    """The weight store's names are those of `named_parameters`; the adapters read `state_dict`."""
    model = model_spec(tiny_model_folder).model.build()
    fused = "layers.0.attention.qkv_linear.wqkv.weight"
    assert fused in dict(model.named_parameters())
    assert fused not in model.state_dict()
    assert {fused.replace("wqkv", name) for name in ("wq", "wk", "wv")} <= model.state_dict().keys()


def test_the_decoder_gives_hidden_states_when_the_head_is_skipped(tiny_model_folder: Path):
    """The trainer calls the head itself, with targets: without this switch whole logits would exist."""
    model = model_spec(tiny_model_folder).model.build()
    model._skip_lm_head = True
    positions = torch.arange(8)[None]
    hidden = model(positions, positions=positions, attention_masks=document_masks(model, positions))
    assert hidden.shape == (1, 8, model.config.dim)


def test_a_schedule_runs_past_its_last_step_below_zero():
    """`ScheduledOptimizer` stops the schedule at `total_steps`; once this fails it need not."""
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1.0})
    optimizers = OptimizersContainer.Config(param_groups=[group]).build(model_parts=[torch.nn.Linear(1, 1)])
    schedule = LRSchedulersContainer.Config(warmup_steps=0, total_steps=2).build(
        optimizers=optimizers, training_steps=2
    )
    for _ in range(4):
        optimizers.step()
        schedule.step()
    assert schedule.schedulers[0].get_last_lr()[0] < 0
