"""Hints for a teacher: what it sees before an answer beside the prompt, which the policy did not see. Pure.

A hint is the prompt with another last message. It is for answers in one turn; a script that wants hints for other
turns gives them itself (`Trajectory.taught`).
"""

from dataclasses import replace

from goaly.prompts.prompt import PASS_REWARD, Prompt
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.rollout.settings import HintSettings
from goaly.trajectory import POLICY, Group, Trajectory


def with_hints(
    group: Group, prompt: Prompt, settings: HintSettings, tokenizer: ChatTokenizer, max_context: int
) -> Group:
    """The group, with the teacher's contexts for the answers that get a hint. One that has a context already, or whose
    hint and answer are longer than `max_context`, gets none."""
    passed = [one for one in group.samples if one.reward >= PASS_REWARD and _is_answer(one)]
    sibling = _text(passed[0], tokenizer) if passed else None

    def hinted(sample: Trajectory) -> Trajectory:
        if (sample.reward >= PASS_REWARD and settings.to == "failed") or not _is_answer(sample):
            return sample
        known = {"answer": prompt.answer, "sibling": sibling}
        if any(known[name] is None for name in known.keys() & settings.fields) or sample.teacher_contexts:
            return sample
        question = prompt.messages[-1]
        text = settings.text.format(question=question.content, response=_text(sample, tokenizer), **known)
        context = tokenizer.render((*prompt.messages[:-1], replace(question, content=text)), tools=prompt.tools)
        written = sample.turns[1].stop - sample.turns[1].start
        return sample.taught(context) if len(context) + written <= max_context else sample

    return replace(group, samples=tuple(map(hinted, group.samples)))


def _is_answer(sample: Trajectory) -> bool:
    """Whether it is a prompt and one answer to it."""
    return len(sample.turns) == 2 and sample.turns[1].author == POLICY


def _text(sample: Trajectory, tokenizer: ChatTokenizer) -> str:
    """The text of its answer."""
    turn = sample.turns[1]
    return tokenizer.decode(sample.tokens["tokens"][turn.start : turn.stop].tolist())
