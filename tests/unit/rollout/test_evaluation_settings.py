"""Evaluation sets: which problems are asked, each once, and what their settings refuse."""

import json
import logging
from pathlib import Path

import pytest

from goaly.base.config.check import check
from goaly.base.config.settings import Section
from goaly.generate.settings import SamplingSettings
from goaly.prompts.mixture import distinct_prompts
from goaly.prompts.prompt import Split, split_of
from goaly.prompts.settings import ArithmeticSettings, PromptSettings, SourceSettings
from goaly.rollout.evaluation import EvalResult, Evaluation, ProblemSets
from goaly.rollout.evaluation_settings import EvaluationSet, EvaluationSettings

TRAINED = PromptSettings(held_out_fraction=0.3)
ONE_DIGIT = ArithmeticSettings(min_digits=1, max_digits=1)


def file_of(path: Path, count: int, copies: int = 1) -> str:
    """A file of so many problems, each so many times."""
    records = [json.dumps({"prompt": f"{index}+1=", "answer": index + 1}) + "\n" for index in range(count)]
    path.write_text("".join(records * copies))
    return str(path)


def asked(evaluation: EvaluationSettings, prompts: PromptSettings = TRAINED) -> dict[str, list[str]]:
    """What each set asks."""
    sets = ProblemSets(evaluation, prompts).chosen()
    return {one.name: [prompt.messages[0].content for prompt in one.prompts] for one in sets}


def problems(prompts: PromptSettings = TRAINED, **sets: EvaluationSet) -> list[str]:
    """What is wrong with these sets, in a run."""
    evaluation = EvaluationSettings(sets=sets) if sets else EvaluationSettings()
    own = [line for name, one in sets.items() for line in one.problems(f"evaluation.sets.{name}.")]
    return [*evaluation.problems("evaluation."), *own, *beside(evaluation, prompts)]


def beside(evaluation: EvaluationSettings, prompts: PromptSettings) -> list[str]:
    """The problems of these settings with the rest of a run."""
    at = Section(evaluation, "evaluation.")
    return list(evaluation.problems_beside(at, prompts, SamplingSettings(), 512))


def test_more_held_out_prompts_than_there_are_are_each_asked_once_and_that_is_told(tmp_path: Path, caplog) -> None:
    prompts = PromptSettings(task=None, files=(file_of(tmp_path / "a.jsonl", 30, copies=3),), held_out_fraction=0.2)
    with caplog.at_level(logging.WARNING):
        (found,) = asked(EvaluationSettings(prompts=256), prompts).values()
    assert len(found) == len(set(found)) == 9
    assert [record.getMessage() for record in caplog.records] == [
        "evaluation.prompts=256: there are only 9 different held-out problems; each is asked once"
    ]


def test_a_file_is_asked_whole_or_in_part_without_repeats_and_without_a_word(tmp_path: Path, caplog) -> None:
    files = (file_of(tmp_path / "a.jsonl", 20, copies=2),)
    sets = {"all": EvaluationSet(files=files), "some": EvaluationSet(files=files, prompts=5)}
    found = asked(EvaluationSettings(sets=sets))
    assert sorted(found["all"]) == sorted(f"{index}+1=" for index in range(20))
    assert len(set(found["some"])) == 5
    assert not caplog.records


def test_a_task_with_few_problems_gives_them_all_once_and_only_held_out_ones(caplog) -> None:
    sums = EvaluationSet(task="arithmetic", arithmetic=ONE_DIGIT, prompts=500)
    (set_,) = ProblemSets(EvaluationSettings(sets={"sums": sums}), TRAINED).chosen()
    found = [prompt.messages[0].content for prompt in set_.prompts]
    assert len(found) == len(set(found)) < 100
    assert all(split_of(prompt, 0.3) is Split.HELD_OUT for prompt in set_.prompts)
    assert "evaluation.sets.sums.prompts=500: there are only" in caplog.text
    every = ProblemSets(EvaluationSettings(sets={"sums": sums}), PromptSettings(held_out_fraction=0.0)).chosen()
    assert len(every[0].prompts) == 100


def test_several_sources_give_no_problem_twice_and_go_on_where_one_has_no_more(tmp_path: Path) -> None:
    files = tuple(file_of(tmp_path / f"{name}.jsonl", count) for name, count in (("few", 8), ("many", 40)))
    few, many = (SourceSettings(name=Path(file).stem, files=(file,)) for file in files)
    off = SourceSettings(name="off", weight=0.0, task="arithmetic")
    mixed = PromptSettings(task=None, sources=(few, many, off), held_out_fraction=0.5)
    found = distinct_prompts(mixed, Split.HELD_OUT, None)
    contents = [prompt.messages[0].content for prompt in found]
    assert len(contents) == len(set(contents))
    assert {prompt.source for prompt in found} == {"few", "many"}
    alone = PromptSettings(task=None, files=files[1:], held_out_fraction=0.5)
    assert set(contents) == {p.messages[0].content for p in distinct_prompts(alone, Split.HELD_OUT, None)}
    assert [prompt.source for prompt in found[:4]] == ["few", "many", "few", "many"]


def test_the_prompts_of_a_set_carry_its_verifier() -> None:
    sets = {"own": EvaluationSet(task="arithmetic", prompts=2, verifier="a.b:c"), "held_out": EvaluationSet(prompts=2)}
    evaluation = EvaluationSettings(sets=sets)
    found = [prompt.verifier for one in ProblemSets(evaluation, TRAINED).chosen() for prompt in one.prompts]
    assert found == ["a.b:c", "a.b:c", None, None]
    assert evaluation.verifiers == ("a.b:c",)


def test_a_set_without_task_and_files_is_the_default_and_the_default_keeps_its_keys() -> None:
    default = EvaluationSettings(prompts=7, samples_per_prompt=2, temperature=0.5)
    named = EvaluationSet(prompts=7, samples_per_prompt=2, sampling={"temperature": 0.5})
    assert default.named == {"held_out": named}
    assert asked(default) == asked(EvaluationSettings(sets={"held_out": named}))
    assert EvaluationSettings().named["held_out"].sampled(SamplingSettings(temperature=0.7)).temperature == 0.7


def test_only_the_pass_at_k_that_is_asked_for_is_reported_and_always_pass_at_1() -> None:
    result = EvalResult.of([[1.0, 0.0, 0.0, 0.0]], pass_at=(3,))
    assert result.scores == {"pass@1": 0.25, "pass@3": 0.75, "avg@4": 0.25}
    evaluation = Evaluation(policy_version=5, results={"a": result, "b": EvalResult.of([[1.0]])})
    assert evaluation.results["a"].pass_at_1 == 0.25
    assert evaluation.metrics["evaluation/a/pass@3"] == 0.75
    assert evaluation.metrics["evaluation/b/avg@1"] == 1.0


def test_settings_of_sets_that_cannot_work_are_told_with_their_keys(tmp_path: Path) -> None:
    assert check(EvaluationSet, {"prompts": 0}, "evaluation.sets.one")[1] == [
        "evaluation.sets.one.prompts=0: must be at least 1, or all"
    ]
    one = EvaluationSet(samples_per_prompt=2, pass_at=(0, 4), verifier="nowhere", arithmetic=ONE_DIGIT)
    assert problems(one=one) == [
        "evaluation.sets.one.arithmetic.min_digits=1: has no effect, evaluation.sets.one.task is null",
        "evaluation.sets.one.arithmetic.max_digits=1: has no effect, evaluation.sets.one.task is null",
        "evaluation.sets.one.pass_at=[0, 4]: 0 must be at least 1 and at most evaluation.sets.one.samples_per_prompt=2",
        "evaluation.sets.one.pass_at=[0, 4]: 4 must be at least 1 and at most evaluation.sets.one.samples_per_prompt=2",
        "evaluation.sets.one.verifier=nowhere: must be package.module:function",
    ]
    endless = "must be a number where evaluation.sets.sums.task makes problems without end"
    assert problems(sums=EvaluationSet(task="arithmetic")) == [f"evaluation.sets.sums.prompts=all: {endless}"]
    idle = EvaluationSettings(prompts=3, temperature=0.5, sets={"a b": EvaluationSet(prompts=1)})
    assert idle.problems("evaluation.") == [
        "evaluation.sets: 'a b' must be a name of letters, digits, _ and -",
        "evaluation.prompts=3: has no effect, evaluation.sets have their own",
        "evaluation.temperature=0.5: has no effect, evaluation.sets have their own",
    ]
    assert check(EvaluationSettings, {"prompts": 0, "samples_per_prompt": 0}, "evaluation")[1] == [
        "evaluation.prompts=0: must be at least 1",
        "evaluation.samples_per_prompt=0: must be at least 1",
    ]
    cold = beside(EvaluationSettings(temperature=-1.0), TRAINED)
    assert [line.partition(" at least")[0] for line in cold] == ["evaluation.temperature=-1.0: must be 0 (greedy), or"]


@pytest.mark.parametrize("name", ["./trained.jsonl", "sub/../trained.jsonl", "link.jsonl", "{here}/trained.jsonl"])
def test_a_file_of_the_training_data_is_refused_by_any_name(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file_of(tmp_path / "trained.jsonl", 8)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "trained.jsonl")
    (tmp_path / "sub").mkdir()
    name = name.format(here=tmp_path)
    of_file = PromptSettings(task=None, files=("trained.jsonl",), held_out_fraction=0.5)
    source = SourceSettings(name="own", files=("trained.jsonl",))
    of_source = PromptSettings(task=None, sources=(source,), held_out_fraction=0.5)
    for trained in (of_file, of_source):
        (told,) = problems(trained, own=EvaluationSet(files=(name,)))
        assert told.startswith(f"evaluation.sets.own.files: {name} must not be a file of `prompts`")
    same = PromptSettings(task=None, files=(name,), held_out_fraction=0.5)
    (told,) = problems(same, own=EvaluationSet(files=("trained.jsonl",)))
    assert told.startswith("evaluation.sets.own.files: trained.jsonl must not be a file of `prompts`")


def test_what_a_set_and_the_rest_of_a_run_get_wrong_together_is_told(tmp_path: Path) -> None:
    trained = file_of(tmp_path / "trained.jsonl", 8)
    of_file = PromptSettings(task=None, files=(trained,), held_out_fraction=0.01)
    assert problems(of_file) == [
        "prompts.held_out_fraction=0.01: must be higher where an evaluation asks held-out prompts, or give "
        f"evaluation.sets problems of their own: held_out_fraction=0.01 holds out none of the 8 prompts of {trained}"
    ]
    assert problems(of_file, own=EvaluationSet(files=(file_of(tmp_path / "own.jsonl", 2),))) == []
    assert problems(PromptSettings(held_out_fraction=0.0))[0].endswith("of their own: it holds out none")
    assert problems(held_out=EvaluationSet()) == [
        "evaluation.sets.held_out.prompts=all: must be a number where a task of `prompts` makes problems without end"
    ]
    (told,) = problems(of_file, own=EvaluationSet(files=(trained,)))
    assert told.startswith(f"evaluation.sets.own.files: {trained} must not be a file of `prompts`")
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{")
    (told,) = problems(own=EvaluationSet(files=(str(bad),)))
    assert told.startswith(f"evaluation.sets.own.files: {bad}, line 1: not JSON")
    (tmp_path / "none.jsonl").touch()
    (told,) = problems(own=EvaluationSet(files=(str(tmp_path / "none.jsonl"),)))
    assert told.startswith("evaluation.sets.own.prompts=all: there is no such problem")
    own = EvaluationSet(prompts=4, sampling={"temperature": "hot", "topp": 1})
    topp, hot = sorted(problems(own=own), reverse=True)
    assert topp.startswith("evaluation.sets.own.sampling.topp=1: unknown key; did you mean")
    assert hot == "evaluation.sets.own.sampling.temperature=hot: must be a number"
    (told,) = problems(own=EvaluationSet(prompts=4, sampling={"max_tokens": 512}))
    assert told.endswith("max_tokens=512: must leave room for a prompt in a context of 512 tokens")
