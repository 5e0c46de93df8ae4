"""Whether a model can teach another one: they must give each token the same number."""

from collections.abc import Iterator

from goaly.base.config.settings import Section
from goaly.losses.settings import LossSettings
from goaly.models.architecture import Architecture
from goaly.prompts.tokenizer import vocabulary_difference


def teacher_problems(
    loss: LossSettings, at: Section, folder: str, teacher: Architecture, own: str, student: Architecture
) -> Iterator[str]:
    """One line for each reason why the reference's folder cannot teach the model, whose folder is its `own`."""
    if loss.distill is None:
        return
    if (why := vocabulary_difference(own, folder)) is not None:
        yield f"{at}reference.path={folder}: must have the vocabulary of {at}model.path={own} to be its teacher: {why}"
    elif loss.distill.uses_top and teacher.vocab_size > student.vocab_size:
        yield (
            f"{at}loss.distill.by={loss.distill.by}: must be advantage, because the teacher's output has "
            f"{teacher.vocab_size} tokens and the policy's only {student.vocab_size}"
        )


def top_problems(loss: LossSettings, at: Section, student: Architecture) -> Iterator[str]:
    """One line if the model has too few tokens for the most likely ones of a teacher."""
    distill = loss.distill
    if distill is not None and distill.uses_top and distill.top_k > student.vocab_size:
        yield f"{at}loss.distill.top_k={distill.top_k}: must be at most {student.vocab_size}, the model's vocabulary"
