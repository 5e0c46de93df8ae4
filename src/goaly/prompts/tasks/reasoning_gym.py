"""Problems of a data set of the `reasoning-gym` package, scored by the data set itself.

    prompts.task=reasoning_gym prompts.reasoning_gym.name=chain_sum
    reward.verifier=goaly.prompts.tasks.reasoning_gym:verify

Data sets make problem i from their seed and i. A prompt carries the name and options of its data set and the problem's
number; the verifier makes the problem again, for what the data set's scoring needs of it.

A few data sets make other problems in another process, because they depend on Python's hash seed: the verifier refuses
these unless it is set.
"""

import json
from functools import lru_cache
from random import Random
from typing import Any

from goaly.prompts.prompt import SPLIT_KEY, Message, Prompt

try:
    import reasoning_gym  # pyrefly: ignore[missing-import]
    from reasoning_gym.factory import DATASETS  # pyrefly: ignore[missing-import]
    from reasoning_gym.utils import extract_answer  # pyrefly: ignore[missing-import]
except ImportError as error:
    raise ImportError(f"reasoning-gym cannot be imported ({error}); install goaly[reasoning-gym]") from error

NAME = "reasoning_gym"
_INDEX = "index"


class ReasoningGym:
    """One data set as a task."""

    def __init__(self, data_set: str, wording: str):
        """`data_set` has the arguments that make it, as JSON; `{question}` in the wording becomes the problem's."""
        self._data_set = data_set
        self._wording = wording
        self._name, self._size = (json.loads(data_set)[key] for key in ("name", "size"))
        self._problems = _data_set(data_set)

    @property
    def fingerprint(self) -> str:
        """Identifies the settings of the task; streams refuse to resume with another fingerprint."""
        return f"{NAME} {self._data_set} {self._wording}"

    def problem(self, random: Random) -> Prompt:
        """A random problem of the data set."""
        index = random.randrange(self._size)
        entry = self._problems[index]
        return Prompt(
            id=f"{self._name}/{index}",
            source=self._name,
            messages=(Message(role="user", content=self._wording.replace("{question}", entry["question"])),),
            answer=None if entry["answer"] is None else str(entry["answer"]),
            metadata={NAME: self._data_set, _INDEX: str(index), SPLIT_KEY: entry["question"]},
        )


def verify(prompt: Prompt, response: str) -> float:
    """The data set's score of the last <answer>...</answer> in the response, or of all of it if it has none."""
    if NAME not in prompt.metadata:
        raise ValueError(f"prompt {prompt.id} is not of reasoning-gym: it has no `{NAME}` in its metadata")
    problems = _data_set(prompt.metadata[NAME])
    entry = problems[int(prompt.metadata[_INDEX])]
    if entry["question"] != prompt.metadata[SPLIT_KEY]:
        raise ValueError(
            f"prompt {prompt.id}: this data set makes another problem in each process; set the environment variable "
            "PYTHONHASHSEED=0 for the whole run"
        )
    answer = extract_answer(response)
    return float(problems.score_answer(response.strip() if answer is None else answer, entry))


def problem_with(name: str, data_set: str) -> str | None:
    """Why the data set of these arguments cannot be made; None if it can."""
    if name not in DATASETS:
        return f"reasoning-gym has no such data set, must be one of {', '.join(sorted(DATASETS))}"
    try:
        _data_set(data_set)
    except Exception as error:  # each data set checks its options in its own way
        return f"the data set refuses these options ({type(error).__name__}: {error})"
    return None


@lru_cache(maxsize=16)
def _data_set(arguments: str) -> Any:
    return reasoning_gym.create_dataset(**json.loads(arguments))
