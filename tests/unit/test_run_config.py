"""What only the combination of a run's settings can get wrong is told before anything starts."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from random_model import write_random_deepseek, write_random_dots, write_random_gpt_oss

from apps.eval.config import EvalConfig
from apps.sft.config import SftConfig
from goaly.agents.settings import EndpointSettings
from goaly.base.config import load
from goaly.base.config.settings import Section
from goaly.base.errors import ConfigError
from goaly.generate.settings import GeneratorSettings
from goaly.models.definition import model_spec
from goaly.models.families import architecture, read_config
from goaly.models.tiny_model import TinyModel, write_tiny_model
from goaly.plan.placement import IMPORTS, processes
from goaly.plan.run_config import RunConfig
from goaly.reward.advantages import ESTIMATORS
from goaly.rollout.settings import RolloutSettings
from goaly.run.fork_server import FORKED
from goaly.run.policy_server_config import PolicyServerConfig
from goaly.train.settings import ReferenceSettings, TrainerSettings

CONFIGS = Path(__file__).parents[2] / "configs"
GRPO, PPO = CONFIGS / "grpo" / "tiny.yaml", CONFIGS / "ppo" / "tiny.yaml"


def run_config(file: Path, model: Path, *overrides: str) -> RunConfig:
    return load(RunConfig, [f"--config={file}", f"model.path={model}", *overrides], prog="test", description="").config


def test_a_critic_or_a_reference_of_ones_own_is_looked_at_as_the_model_is(tiny_model_folder: Path, tmp_path: Path):
    other = write_tiny_model(tmp_path / "other", TinyModel(layers=1, heads=6, kv_heads=3))
    kl, own = "loss.kl_coef=0.1", f"path={other}"
    nowhere = "/nowhere: has no config.json, must be a Hugging Face folder"
    for overrides, said in [
        ([kl, "reference.path=/nowhere"], [f"reference.path={nowhere}"]),
        (["critic.path=/nowhere"], [f"critic.path={nowhere}"]),
        (
            [kl, "reference.tp=3"],
            [f"reference.tp=3: must divide the model's {count} heads" for count in ("4 attention", "2 key-value")],
        ),
        (
            [kl, f"reference.{own}", "reference.tp=4", f"critic.{own}", "critic.tp=2"],
            [
                "critic.tp=2: must divide the critic's 3 key-value heads",
                "reference.tp=4: must divide the reference's 6 attention heads",
                "reference.tp=4: must divide the reference's 3 key-value heads",
            ],
        ),
    ]:
        with pytest.raises(ConfigError) as error:
            run_config(PPO, tiny_model_folder, *overrides)
        assert [problem.rpartition(" (")[0] for problem in error.value.problems] == said
    assert run_config(PPO, tiny_model_folder, kl, f"reference.{own}", "reference.tp=3")


def test_prompts_of_reasoning_gym_are_not_scored_as_additions(tiny_model_folder: Path):
    gym = ["prompts.task=reasoning_gym", "prompts.reasoning_gym.name=chain_sum"]
    with pytest.raises(ConfigError) as error:
        run_config(GRPO, tiny_model_folder, *gym)
    (problem,) = error.value.problems
    assert problem.startswith(
        "reward.verifier=goaly.prompts.tasks.arithmetic:verify: must be goaly.prompts.tasks.reasoning_gym:verify where "
        "prompts.task is reasoning_gym, or your own"
    )
    run_config(GRPO, tiny_model_folder, *gym, "reward.verifier=goaly.prompts.tasks.reasoning_gym:verify")


def test_prompts_with_tools_for_an_agent_whose_calls_no_parser_reads_are_refused(
    tiny_model_folder: Path, tmp_path: Path
):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "1", "tools": [tool]}) + "\n" for n in range(40)))
    given = ["prompts.task=null", f"prompts.files=[{file}]", "rollout.endpoint={}"]
    program = ["agent.command=[sh, -c, exit]"]
    with pytest.raises(ConfigError) as error:
        run_config(GRPO, tiny_model_folder, *given, *program)
    (problem,) = error.value.problems
    needed = "must name vLLM's parser of the model's calls, because prompts have tools"
    assert problem.startswith(f"chat.tool_parser=null: {needed}")
    run_config(GRPO, tiny_model_folder, *given, *program, "chat.tool_parser=hermes")
    run_config(GRPO, tiny_model_folder, *given, "agent.function=apps.agent.own:episode")
    run_config(GRPO, tiny_model_folder, *given)


def with_advantages(name: str, model: Path, *overrides: str) -> RunConfig | list[str]:
    """The run's settings with these advantages, or what is wrong with them."""
    try:
        return run_config(PPO if name == "gae" else GRPO, model, f"advantages.name={name}", *overrides)
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize("name", ESTIMATORS.names)
def test_a_sample_alone_is_refused_where_it_is_compared_with_its_group(name: str, tiny_model_folder: Path):
    found = with_advantages(name, tiny_model_folder, "backlog.group_size=1")
    if name in ("gae", "reinforce_pp", "process"):  # process compares the steps of an answer, too
        assert isinstance(found, RunConfig)
        assert found.backlog.group_size == 1
        return
    said = (
        f"backlog.group_size=1: must be at least 2, because advantages.name={name} compares a sample with the others "
        "of its group (override)"
    )
    assert found == [said]


@pytest.mark.parametrize("name", ["rloo", "process", "gae"])
def test_dynamic_sampling_is_refused_where_a_group_of_equal_rewards_teaches(name: str, tiny_model_folder: Path):
    found = with_advantages(name, tiny_model_folder, "backlog.dynamic_sampling=true", "backlog.group_size=2")
    if name == "rloo":
        assert isinstance(found, RunConfig)
        assert found.advantages.compares_groups
        return
    said = (
        f"backlog.dynamic_sampling=true: must be false where advantages.name is {name}, which also learns from groups "
        "of equal rewards; group, group_mean, rloo, maxrl, reinforce_pp_baseline do not, nor do functions of your own "
        "with @compares_groups (override)"
    )
    assert found == [said]


ONE_STEP = "with loss.proximal=trainer and trainer.minibatches=1 the ratio is 1"


@pytest.mark.parametrize(
    ("set_idle", "why", "more"),
    [
        ("backlog.window=3", "backlog.order is completion", ["backlog.order=completion"]),
        ("backlog.max_length_weight=9.0", "backlog.length_correction is none", []),
        ("backlog.max_no_signal_share=0.5", "backlog.dynamic_sampling is off", []),
        ("reference.threads=2", "loss.kl_coef and advantages.kl_coef are 0 and loss.distill is null", []),
        ("loss.max_age=3", "backlog bounds the age of tokens to 3 versions", []),
        (
            "loss.kl_coef=0.1",
            "with reference.refresh_every=1 and trainer.minibatches=1 the reference is the policy itself",
            ["reference.refresh_every=1"],
        ),
        ("advantages.overlong.limit=266", "a sequence has at most 256 tokens", ["advantages.overlong.buffer=10"]),
        ("hosts.bind.reference=[0]", "loss.kl_coef and advantages.kl_coef are 0 and loss.distill is null", []),
        ("hosts.bind.critic=[0]", "critic is null", []),
        (
            "trainer.schedule.min_lr_factor=0.2",
            "trainer.schedule.decay=constant keeps the full rate",
            ["trainer.schedule.decay=constant"],
        ),
        (
            "prompts.arithmetic.max_digits=3",
            "prompts.task is null",
            ["prompts.task=null", "prompts.files=[{problems}]"],
        ),
        (
            "prompts.arithmetic.max_digits=3",
            "prompts.sources have their own",
            ["prompts.task=null", "prompts.sources=[{name: a, task: arithmetic}]"],
        ),
        (
            "evaluation.samples_per_prompt=3",
            "evaluation.sets have their own",
            ["evaluation.sets={held_out: {prompts: 2}}"],
        ),
        ("evaluation.every=500", "the run ends after steps=160", []),
        ("save.every=161", "the run ends after steps=160", []),
        ("save.keep=3", "save.every is null", []),
        ("save.best=true", "evaluation.every is null", ["save.every=10"]),
        ("loss.options.clip_low=0.1", ONE_STEP, ["loss.proximal=trainer"]),
        ("loss.options.positive=2.0", ONE_STEP, ["loss.proximal=trainer", "loss.name=sapo"]),
    ],
)
def test_what_another_setting_leaves_without_effect_is_told(
    set_idle, why, more, tiny_model_folder: Path, tmp_path: Path
):
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(f'{{"prompt": "{number}+1="}}\n' for number in range(60)))
    more = [override.replace("{problems}", str(problems)) for override in more]
    with pytest.raises(ConfigError) as error:
        run_config(GRPO, tiny_model_folder, *more, set_idle)
    assert error.value.problems == [f"{set_idle}: has no effect, {why} (override)"]


def test_a_clip_has_an_effect_from_a_batchs_second_step_on_and_a_loss_of_ones_own_may_always(tiny_model_folder: Path):
    decoupled, clip = "loss.proximal=trainer", "loss.options.clip_low=0.1"
    assert run_config(GRPO, tiny_model_folder, decoupled, "trainer.minibatches=2", clip)
    own = ["loss.name=tests.unit.losses.test_objective:share_clipped", "loss.options.most=2.0"]
    assert run_config(GRPO, tiny_model_folder, decoupled, *own)
    assert run_config(GRPO, tiny_model_folder, "loss.max_age=2")
    with_reference = ["loss.kl_coef=0.1", "reference.refresh_every=1"]
    assert run_config(GRPO, tiny_model_folder, *with_reference, "trainer.minibatches=2")
    assert run_config(GRPO, tiny_model_folder, *with_reference, "loss.kl_estimator=k1")


@pytest.mark.parametrize(
    ("change", "must"),
    [
        ("sampling.temperature=0.5", "must be trainer.temperature (1.0)"),
        ("sampling.temperature=0.0", "must be trainer.temperature (1.0)"),
        ("sampling.top_p=0.9", "must be 1.0 in a run that trains"),
        ("sampling.top_k=20", "must be -1 in a run that trains"),
        ("sampling.min_p=0.1", "must be 0.0 in a run that trains"),
        ("sampling.min_tokens=4", "must be 0 in a run that trains"),
        ("sampling.presence_penalty=0.5", "must be 0.0 in a run that trains"),
        ("sampling.frequency_penalty=0.5", "must be 0.0 in a run that trains"),
        ("sampling.repetition_penalty=1.1", "must be 1.0 in a run that trains"),
    ],
)
def test_a_run_that_trains_samples_from_the_distribution_that_it_trains(change, must, tiny_model_folder: Path):
    with pytest.raises(ConfigError) as error:
        run_config(GRPO, tiny_model_folder, change)
    (problem,) = error.value.problems
    assert problem.startswith(f"{change}: {must}")


def test_temperatures_that_agree_and_settings_of_where_answers_end_are_fine_in_a_run_that_trains(
    tiny_model_folder: Path,
):
    same = ["sampling.temperature=0.5", "trainer.temperature=0.5"]
    config = run_config(GRPO, tiny_model_folder, *same, 'sampling.stop=["|", ";"]', "sampling.stop_token_ids=[5]")
    assert (config.sampling.stop, config.sampling.stop_token_ids) == (["|", ";"], [5])


def test_a_template_argument_that_the_models_chat_template_does_not_read_is_told_before_anything_starts(
    tiny_model_folder: Path,
):
    with pytest.raises(ConfigError) as error:
        run_config(GRPO, tiny_model_folder, "chat.template_args.enable_thinking=false")
    assert error.value.problems == [
        "chat.template_args.enable_thinking=False: has no effect, the chat template does not read it (override)"
    ]


def refused(model: Path, *overrides: str) -> list[str]:
    """What is wrong with these settings."""
    with pytest.raises(ConfigError) as error:
        run_config(GRPO, model, *overrides)
    return error.value.problems


def test_a_split_without_a_problem_is_told_before_anything_starts(tmp_path: Path, tiny_model_folder: Path):
    path = tmp_path / "few.jsonl"
    path.write_text("".join(f'{{"prompt": "{number}+1=", "answer": "x"}}\n' for number in range(8)))
    of_file = ["prompts.task=null", f"prompts.files=[{path}]"]
    assert refused(tiny_model_folder, *of_file, "prompts.held_out_fraction=0.01") == [
        "prompts.held_out_fraction=0.01: must be higher where an evaluation asks held-out prompts, or give "
        f"evaluation.sets problems of their own: held_out_fraction=0.01 holds out none of the 8 prompts of {path} "
        "(override)"
    ]
    assert refused(tiny_model_folder, *of_file, "prompts.held_out_fraction=0.999999") == [
        "prompts.held_out_fraction=0.999999: must leave something to train on: held_out_fraction=0.999999 holds out "
        f"all of the 8 prompts of {path} (override)"
    ]
    assert "holds out none" in refused(tiny_model_folder, "prompts.held_out_fraction=0.0")[0]
    path.write_text('{"prompt": "1"}\n{')
    (told,) = refused(tiny_model_folder, *of_file)
    assert told.startswith(f"prompts.files: {path}, line 2: not JSON")


def test_a_head_dimension_that_vllm_has_no_cpu_attention_for_is_told_before_anything_starts(tmp_path: Path):
    odd = write_tiny_model(tmp_path / "odd", TinyModel(layers=1, head_dim=24))
    generator = GeneratorSettings(max_context=16)
    at = Section(generator, "generator.")
    shape = architecture(read_config(str(odd)), where="odd")
    (told,) = generator.model_problems(at, "model.path=odd", shape, "float32", device="cpu")
    assert told.startswith("model.path=odd: has attention heads of dimension 24, must be one of 32, 64, 80")
    assert list(generator.model_problems(at, "model.path=odd", shape, "float32", device="cuda")) == []
    for found in (refused(odd), evaluation_refused(odd)):
        assert [line for line in found if "attention heads of dimension 24" in line] == found


def evaluation_refused(model: Path) -> list[str]:
    """What is wrong with an evaluation of this model."""
    with pytest.raises(ConfigError) as error:
        load(EvalConfig, [f"--config={CONFIGS / 'eval' / 'tiny.yaml'}", f"path={model}"], prog="test", description="")
    return error.value.problems


def test_compiling_without_a_gpu_is_told_before_anything_starts(tiny_model_folder: Path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (told,) = refused(tiny_model_folder, "trainer.compile=true")
    assert told.startswith("trainer.compile=true: needs a GPU")
    argv = [f"--config={CONFIGS / 'sft' / 'tiny.yaml'}", "trainer.compile=true"]
    with pytest.raises(ConfigError) as error:
        load(SftConfig, argv, prog="test", description="")
    assert error.value.problems == [told]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert run_config(GRPO, tiny_model_folder, "trainer.compile=true")


def test_ranks_on_other_hosts_may_compile_and_offload_with_a_torch_that_can(monkeypatch):
    compiling, offloading = TrainerSettings(compile=True), ReferenceSettings(offload=True)
    for built in (True, False):
        monkeypatch.setattr("torch.backends.cuda.is_built", lambda built=built: built)
        assert (compiling.device_problems("trainer.", elsewhere=True) == []) is built
        assert (offloading.device_problems("reference.", elsewhere=True) == []) is built


def test_offloading_the_reference_without_a_gpu_is_told_before_anything_starts(tiny_model_folder: Path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (told,) = refused(tiny_model_folder, "loss.kl_coef=0.1", "reference.offload=true")
    assert told.startswith("reference.offload=true: needs a GPU")
    (told,) = refused(tiny_model_folder, "reference.offload=true")
    assert "has no effect" in told
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert run_config(GRPO, tiny_model_folder, "loss.kl_coef=0.1", "reference.offload=true").reference.offload


GPUS, NO_GPUS = "hosts.imagine={gpus: 8}", "hosts.imagine={hosts: 2}"
FOR_GPUS = [
    ("generator.async_scheduling=true", "must be false on CPU", []),
    ("generator.engine=native", "must be torchtitan in a run that trains on CPU", []),
    ("trainer.compile=true", "needs a GPU", []),
    ("reference.offload=true", "needs a GPU", ["loss.kl_coef=0.1"]),
]
FOR_CPUS = [("generator.tp=2", "must be 1 with model.numerics=bitwise on GPUs", ["model.numerics=bitwise"])]


@pytest.mark.parametrize("here", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("change", "must", "more", "fits", "refuses"),
    [(*one, GPUS, NO_GPUS) for one in FOR_GPUS] + [(*one, NO_GPUS, GPUS) for one in FOR_CPUS],
)
def test_an_imagined_cluster_decides_what_its_devices_can_do_and_not_this_machine(
    change, must, more, fits, refuses, here, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: here == "cuda")
    for module in ("goaly.plan.run_config", "goaly.generate.settings"):
        monkeypatch.setattr(f"{module}.vllm_device", lambda: here)
    more = [*more, "hosts.bind={}", "generator.on_update=recompute"]
    assert run_config(GRPO, tiny_model_folder, *more, change, fits)
    (told,) = refused(tiny_model_folder, *more, change, refuses)
    assert told.startswith(f"{change}: {must}")


@pytest.mark.parametrize(("schema", "config"), [(EvalConfig, "eval"), (PolicyServerConfig, "serve")])
def test_where_weights_never_change_a_cpu_has_vllms_own_models_and_no_asynchronous_scheduling(
    schema, config, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("goaly.generate.settings.vllm_device", lambda: "cpu")
    argv = [f"--config={CONFIGS / config / 'tiny.yaml'}", f"path={tiny_model_folder}", "generator.engine=native"]
    assert load(schema, argv, prog="", description="").config.generator.engine == "native"
    with pytest.raises(ConfigError) as error:
        load(schema, [*argv, "generator.async_scheduling=true"], prog="", description="")
    (told,) = error.value.problems
    assert told.startswith("generator.async_scheduling=true: must be false on CPU")


def test_an_imagined_gpu_has_attention_for_any_head_dimension(tmp_path: Path):
    odd = write_tiny_model(tmp_path / "odd", TinyModel(layers=1, head_dim=24))
    assert run_config(GRPO, odd, GPUS)


def test_template_arguments_are_not_checked_without_the_folder_that_has_the_template(tmp_path: Path):
    known = ["model.architecture=qwen3-8b", "chat.template_args={enable_thinking: false}"]
    assert run_config(GRPO, tmp_path / "not-here", *known)
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    (told,) = refused(tmp_path / "not-here", *known, f"chat.template_file={template}")
    assert told.startswith("chat.template_args.enable_thinking=False: has no effect")


def test_bindings_of_a_critic_and_a_reference_that_run_are_in_order(tiny_model_folder: Path):
    assert run_config(PPO, tiny_model_folder, "loss.kl_coef=0.1", "hosts.bind.reference=[0]").critic is not None


def test_what_cannot_be_bitwise_is_told_before_anything_starts(tiny_model_folder: Path, tmp_path: Path):
    bitwise, recompute = "model.numerics=bitwise", "generator.on_update=recompute"
    assert run_config(GRPO, tiny_model_folder, bitwise, recompute, "trainer.tp=2", "generator.tp=2", "trainer.fsdp=2")
    with pytest.raises(ConfigError) as error:
        run_config(GRPO, tiny_model_folder, bitwise, "generator.engine=native", "generator.on_update=keep")
    assert [problem.partition(":")[0] for problem in error.value.problems][-2:] == [
        "generator.engine=native",
        "generator.on_update=keep",
    ]
    with pytest.raises(ConfigError, match=r"model\.numerics=bitwise: must be fast with trainer\.lora: "):
        run_config(GRPO, tiny_model_folder, bitwise, recompute, "trainer.lora={}")
    wide = write_tiny_model(tmp_path / "wide", TinyModel(kv_heads=4))
    with pytest.raises(ConfigError, match=r"trainer.tp=4: must be at most 2 .*\ngenerator.tp=4: must be at most 2"):
        run_config(GRPO, wide, bitwise, recompute, "trainer.tp=4", "generator.tp=4")
    shares = "loss.kl_coef=0.1", "trainer.cp=2", "reference.cp=2", "critic={cp: 2}"
    with pytest.raises(ConfigError) as error:
        run_config(PPO, tiny_model_folder, bitwise, recompute, *shares)
    assert [problem.partition(", which")[0] for problem in error.value.problems] == [
        f"{section}.cp=2: must be 1 with model.numerics=bitwise" for section in ("trainer", "reference", "critic")
    ]
    experts = write_tiny_model(tmp_path / "experts", TinyModel(experts=4))
    divided = "trainer.fsdp=2", "trainer.ep=2", "generator.tp=2", "generator.ep=2"
    assert run_config(GRPO, experts, bitwise, recompute, *divided)
    replay = "moe.routing=replay"
    with pytest.raises(ConfigError, match=r"moe.routing=replay: must be own with model.numerics=bitwise"):
        run_config(GRPO, experts, bitwise, recompute, replay)
    assert run_config(GRPO, experts, bitwise, recompute, replay, "backlog.max_staleness=0")
    assert run_config(GRPO, experts, bitwise, replay, "generator.on_update=drain")
    narrow = write_tiny_model(tmp_path / "narrow", TinyModel(experts=4, hidden_dim=40))
    with pytest.raises(ConfigError, match="bitwise: must be fast for experts of width 40 in a model of width 96"):
        run_config(GRPO, narrow, bitwise, recompute)
    for dtype, transfer, is_refused in [
        ("float32", "bfloat16", True),
        ("bfloat16", "float16", True),
        ("bfloat16", "float32", False),
    ]:
        given = tiny_model_folder, bitwise, recompute, f"model.dtype={dtype}", f"weights.transfer_dtype={transfer}"
        if is_refused:
            with pytest.raises(ConfigError, match=f"weights.transfer_dtype={transfer}: must be null or float32 with"):
                run_config(GRPO, *given)
        else:
            assert run_config(GRPO, *given)


def test_a_reference_and_a_critic_of_more_ranks_than_can_be_bitwise_are_told_too(tmp_path: Path):
    bitwise = "model.numerics=bitwise", "generator.on_update=recompute"
    wide = write_tiny_model(tmp_path / "wide", TinyModel(kv_heads=4))
    for file, overrides, said in [
        (GRPO, ["loss.kl_coef=0.1", "reference.tp=4"], "reference.tp=4: must be at most 2 with model.numerics=bitwise"),
        (PPO, ["critic.tp=4"], "critic.tp=4: must be at most 2 with model.numerics=bitwise"),
    ]:
        with pytest.raises(ConfigError) as error:
            run_config(file, wide, *bitwise, *overrides)
        (problem,) = error.value.problems
        assert problem.startswith(said)


def test_on_a_gpu_bitwise_numerics_are_for_one_tensor_parallel_rank_without_the_compiler(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("goaly.plan.run_config.vllm_device", lambda: "cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    bitwise = GRPO, tiny_model_folder, "model.numerics=bitwise", "generator.on_update=recompute"
    assert run_config(*bitwise, "trainer.fsdp=2", "generator.replicas=2")
    with pytest.raises(ConfigError) as error:
        run_config(*bitwise, "trainer.tp=2", "generator.tp=2")
    for section in ("trainer", "generator"):
        assert any(f"{section}.tp=2: must be 1 with model.numerics=bitwise on" in one for one in error.value.problems)
    with pytest.raises(ConfigError, match=r"trainer\.compile=true: must be false with model"):
        run_config(*bitwise, "trainer.compile=true")


@pytest.mark.parametrize(
    ("write", "family"),
    [(write_random_gpt_oss, "gpt_oss"), (write_random_deepseek, "deepseek_v3"), (write_random_dots, "dots1")],
)
def test_bitwise_numerics_are_refused_for_other_families_than_those_of_the_recipes(
    tiny_model_folder: Path, tmp_path: Path, write: Callable[[Path], Path], family: str
):
    other = write(tmp_path / "other")
    said = f"model.numerics=bitwise: must be fast for {family}: bitwise numerics have layers for qwen3 and llama3 only"
    for file, model, overrides, whose in [
        (GRPO, other, [], ""),
        (GRPO, tiny_model_folder, ["loss.kl_coef=0.1", f"reference.path={other}"], f"reference.path={other}: "),
        (PPO, tiny_model_folder, [f"critic.path={other}"], f"critic.path={other}: "),
    ]:
        with pytest.raises(ConfigError) as error:
            run_config(file, model, "model.numerics=bitwise", "generator.on_update=recompute", *overrides)
        assert any(problem.startswith(whose + said) for problem in error.value.problems)
    with pytest.raises(ConfigError, match=f"must be fast for {family}"):
        model_spec(other, numerics="bitwise")  # as in a script without these settings


def test_ranks_that_experts_cannot_be_divided_among_are_told_before_anything_starts(
    tiny_model_folder: Path, tmp_path: Path
):
    experts = write_tiny_model(tmp_path / "experts", TinyModel(layers=1, experts=6))
    narrow = write_tiny_model(tmp_path / "narrow", TinyModel(layers=1, experts=6, hidden_dim=24))
    tied = write_tiny_model(tmp_path / "tied", TinyModel(layers=2, tied=True))
    odd = {"n_shared_experts": 1, "moe_intermediate_size": 33, "intermediate_size": 257}
    latent = write_random_deepseek(tmp_path / "latent", **odd)
    sinks = write_random_gpt_oss(tmp_path / "sinks", intermediate_size=24)
    shared = write_tiny_model(tmp_path / "shared", TinyModel(layers=1, experts=6, shared_experts=1))
    uneven = write_tiny_model(tmp_path / "uneven", TinyModel(layers=1, hidden_dim=97, characters="abc"))
    for model, overrides, said in [
        (uneven, ["generator.tp=2"], "generator.tp=2: must divide the model's vocabulary of 9 tokens"),
        (uneven, ["generator.tp=2"], "generator.tp=2: must divide the width 97 of the model's feed-forward networks"),
        (tiny_model_folder, ["trainer.fsdp=2", "trainer.ep=2"], "trainer.ep=2: must be 1, because the model has no"),
        (experts, ["trainer.fsdp=4", "trainer.ep=4"], "trainer.ep=4: must divide the model's 6 experts"),
        (experts, ["trainer.fsdp=4"], "trainer.fsdp=4: must divide the model's 6 experts"),
        (
            experts,
            ["trainer.fsdp=14", "trainer.ep=2"],
            "trainer.fsdp * trainer.tp * trainer.cp = 14: its 7 ranks for each of the model's 6 experts must divide",
        ),
        (
            experts,
            ["trainer.fsdp=16", "trainer.lora={rank: 8}"],
            "trainer.fsdp=16: its 16 ranks for each of the model's 6 experts must divide an expert's adapters' rank 8",
        ),
        (
            experts,
            ["trainer.lora={rank: 8}", "reference={fsdp: 16, refresh_every: 1}", "loss.kl_coef=0.1"],
            "reference.fsdp=16: its 16 ranks for each of the model's 6 experts must divide an expert's adapters' rank",
        ),
        (experts, ["trainer.fsdp=2", "trainer.cp=2"], "trainer.fsdp * trainer.cp = 4: must divide the model's 6"),
        (sinks, ["trainer.compile=true"], "trainer.compile=true: must be false for gpt-oss: its attention"),
        (sinks, ["generator.engine=native"], "generator.engine=native: must be torchtitan for a model with experts"),
        (sinks, ["trainer.expert_bias_rate=0.1"], "trainer.expert_bias_rate=0.1: must be 0, the model chooses experts"),
        (sinks, ["generator.tp=2"], "generator.tp=2: the model's experts have width 24, must be a multiple of 8 for"),
        (experts, ["trainer.pp=2"], "trainer.pp=2: must be at most the model's 1 layers"),
        (experts, ["critic={pp: 2}"], "critic.pp=2: must be at most the model's 1 layers"),
        (tied, ["trainer.pp=2"], "trainer.pp=2: must be 1 for tied embeddings: the first and the last stage would"),
        (tied, ["reference={pp: 2}", "loss.kl_coef=0.1"], "reference.pp=2: must be 1 for tied embeddings: the"),
        (
            experts,
            ["trainer.pp=2", "trainer.fsdp=2", "trainer.ep=4"],
            "trainer.ep=4: must divide the number of ranks of a stage, trainer.fsdp * trainer.tp * trainer.cp = 2",
        ),
        (experts, ["critic={fsdp: 4}"], "critic.fsdp=4: must divide the model's 6 experts"),
        (
            narrow,
            ["trainer.tp=2"],
            "trainer.tp=2: the model's experts have width 24, must be a multiple of 8 for each of 2",
        ),
        (narrow, ["generator.tp=2"], "generator.tp=2: the model's experts have width 24, must be a multiple of 8 for"),
        (experts, ["generator.engine=native"], "generator.engine=native: must be torchtitan for a model with experts"),
        (tiny_model_folder, ["trainer.expert_balance=0.1"], "trainer.expert_balance=0.1: has no effect, the model has"),
        (
            experts,
            ["trainer.expert_bias_rate=0.1"],
            "trainer.expert_bias_rate=0.1: must be 0, the model chooses experts without",
        ),
        (latent, ["trainer.expert_balance=0.1"], "trainer.expert_balance=0.1: must be 0, the model balances its"),
        (
            experts,
            ["trainer.expert_balance=0.1", "loss.denominator=after", "loss.max_age=1"],
            "trainer.expert_balance=0.1: must be 0 with loss.denominator=after, which divides",
        ),
        (shared, ["trainer.expert_balance=0.1"], "trainer.expert_balance=0.1: must be 0, the model balances its"),
        (latent, ["generator.tp=2"], "generator.tp=2: must divide the width 33 of the model's shared experts"),
        (latent, ["trainer.tp=2"], "trainer.tp=2: must divide the width 257 of the model's dense layers"),
        (experts, ["trainer.fsdp=2", "trainer.ep=3"], "trainer.ep=3: must divide the number of ranks, trainer.fsdp"),
        (
            experts,
            ["trainer.fsdp=3", "trainer.tp=2", "trainer.ep=3"],
            "trainer.ep=3: must be 1 or a multiple of trainer.tp=2",
        ),
        (experts, ["generator.tp=2", "generator.ep=3"], "generator.ep=3: must be 1 or generator.tp=2"),
    ]:
        assert [line for line in refused(model, *overrides) if line.startswith(said)], refused(model, *overrides)
    assert not any("pp" in line for line in refused(tied, "critic={pp: 2}"))  # its head replaces the tied projection


def test_choices_that_cannot_be_replayed_are_told_before_anything_starts(tiny_model_folder: Path, tmp_path: Path):
    experts = write_tiny_model(tmp_path / "experts", TinyModel(layers=1, experts=6))
    many = write_tiny_model(tmp_path / "many", TinyModel(layers=1, experts=257))
    other = write_tiny_model(tmp_path / "other", TinyModel(layers=2, experts=6))
    replay, reference = "moe.routing=replay", ["loss.kl_coef=0.1", f"reference.path={other}"]
    for model, overrides, said in [
        (tiny_model_folder, [], "has no effect, the model has no experts"),
        (many, [], "the model has 257 experts, must have at most 256"),
        (experts, reference, "the reference has (layers, experts, experts of a token) (2, 6, 2), must have (1, 6, 2)"),
    ]:
        (told,) = refused(model, replay, *overrides)
        assert told.startswith(f"moe.routing=replay: {said}")
    assert run_config(GRPO, experts, replay).moe.replays
    compare = "moe.compare_every=3"
    (told,) = refused(experts, compare)
    assert told.startswith("moe.compare_every=3: has no effect, moe.routing=own replays no choices")
    every_third = run_config(GRPO, experts, replay, compare).moe
    assert [version for version in range(7) if every_third.compares(version)] == [0, 3, 6]
    assert not run_config(GRPO, experts, replay, "moe.compare_every=null").moe.compares(0)
    assert not run_config(GRPO, experts, *reference).moe.replays
    critic = run_config(PPO, experts, replay, f"critic.path={other}").critic  # which routes by its own scores
    assert critic is not None


def test_passes_are_padded_for_the_ranks_that_divide_them_and_to_few_lengths_under_tensor_parallelism() -> None:
    layouts = ({"fsdp": 4}, {"cp": 2}, {"tp": 2}, {"tp": 3}, {"tp": 2, "cp": 2})
    assert [TrainerSettings(**layout).token_multiple for layout in layouts] == [1, 4, 128, 384, 128]


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("model=[small]", "unknown key; did you mean rollout.endpoint.untrained.models?"),
        ("models=[small, '']", "must be names or patterns, not empty; '*' is any model"),
        ("headers={'x-purpose: title': '*'}", "must have names of HTTP headers, without spaces and colons, as keys"),
        ("headers={x-purpose: ['*']}", "must be text"),
        ("metadata={'': small}", "must have keys of a request's metadata as keys"),
        ("models=small", "must be a list"),
    ],
)
def test_a_misspelt_rule_of_requests_that_are_not_trained_is_refused(
    tiny_model_folder: Path, rule: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        run_config(GRPO, tiny_model_folder, f"rollout.endpoint.untrained.{rule}")


def test_each_worker_of_an_endpoint_has_a_port_that_there_is() -> None:
    settings = RolloutSettings(workers=4, endpoint=EndpointSettings(port=65533))
    assert settings.problems("rollout.") == [
        "rollout.endpoint: port=65533 must be at most 65532, so that each worker has its own"
    ]
    assert RolloutSettings(workers=4, endpoint=EndpointSettings(port=65532)).problems("") == []


def test_the_processes_of_workers_with_an_endpoint_import_what_serves_it(tiny_model_folder: Path) -> None:
    for endpoint, libraries in (("null", "rollout"), ("{}", "endpoint")):
        config = run_config(GRPO, tiny_model_folder, f"rollout.endpoint={endpoint}", "rollout.workers=2")
        workers = [one for one in processes(config) if one.role == "rollout"]
        assert [one.libraries for one in workers] == [libraries, libraries]
        assert libraries in IMPORTS
        assert libraries in FORKED


@pytest.mark.parametrize("tp", [1, 2])
def test_a_cache_too_small_for_one_sequence_is_refused_with_one_that_fits(tp: int, tiny_model_folder: Path):
    overrides = ["generator.max_context=200", "backlog.row_length=200", f"generator.tp={tp}"]
    found = refused(tiny_model_folder, "generator.kv_cache_gib=0.0001", *overrides)
    (said,) = (line for line in found if "kv_cache_gib" in line)
    start, least, rest = re.split(r"must be at least (\S+) ", said)
    assert start == "generator.kv_cache_gib=0.0001: "
    assert rest.startswith("to hold a sequence of generator.max_context=200")
    run_config(GRPO, tiny_model_folder, f"generator.kv_cache_gib={least}", *overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("coding={}", "chat.tool_parser=null: must name vLLM's parser of the model's calls where coding.agent=tools"),
        ("coding.agent=program", "coding.command=[]: must name a program where coding.agent is program"),
        (
            "coding.agent=program coding.command=[codex]",
            "rollout.endpoint=null: must be a section, because coding.comm",
        ),
        (
            "coding.agent=program coding.command=[codex] rollout.endpoint={} coding.turns=5",
            "coding.turns=5: has no effect, coding.agent is program",
        ),
        ("coding.agent=text coding.command=[codex]", "coding.command=[codex]: has no effect, coding.agent is text"),
        ("sandbox.seconds_unowned=5", "sandbox.seconds_unowned=5: has no effect, coding is null"),
        (
            "coding.agent=text prompts.task=null prompts.reader=goaly.coding.task_files:read_prompts "
            "prompts.files=[nope]",
            "prompts.files: nope does not exist",
        ),
    ],
)
def test_a_coding_agent_needs_what_its_kind_asks_for(tiny_model_folder: Path, overrides: str, said: str):
    with pytest.raises(ConfigError) as error:
        run_config(GRPO, tiny_model_folder, *overrides.split())
    (line,) = error.value.problems
    assert line.startswith(said)


def test_coding_tasks_need_their_reader(tiny_model_folder: Path, tmp_path: Path):
    (tmp_path / "tasks.jsonl").write_text('{"task": "adding"}\n')
    for path, said in (
        (tmp_path / "tasks.jsonl", "prompts.reader=null: must be goaly.coding.task_files:read_prompts where coding is"),
        (tmp_path, "for coding tasks prompts.reader must be goaly.coding.task_files:read_prompts"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_config(GRPO, tiny_model_folder, "coding.agent=text", "prompts.task=null", f"prompts.files=[{path}]")


@pytest.mark.parametrize(
    "overrides",
    [
        "coding={} chat.tool_parser=hermes sandbox.seconds_unowned=5",
        "coding.agent=text",
        "coding.agent=program coding.command=[codex] rollout.endpoint={}",
    ],
)
def test_a_run_with_a_coding_agent_of_each_kind_has_no_problems(tiny_model_folder: Path, overrides: str):
    assert run_config(GRPO, tiny_model_folder, *overrides.split()).coding is not None
