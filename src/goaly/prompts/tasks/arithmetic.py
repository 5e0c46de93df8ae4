"""Addition of two numbers with the work written out: the task that a tiny model learns on two cores.

    prompt    57+68=
    response  7+8+0=15,5+6+1=12|125

There is one step for each digit, least significant first: both digits, the carry, and their two-digit sum. The answer
follows the bar, and only the answer is verified. The number of digits is drawn with weight
`1 / digits ** weight_power`, so a few responses are very long.

Demonstrations may forget carries. A policy that imitates a teacher who forgets more than half of them prefers the wrong
answer, so that RL can't succeed by sharpening alone.
"""

from dataclasses import asdict, replace
from random import Random

from goaly.prompts.prompt import SPLIT_KEY, Message, Prompt
from goaly.prompts.settings import ArithmeticSettings

NAME = "arithmetic"
ANSWER_MARK = "|"


class Arithmetic:
    """The addition task under one setting."""

    def __init__(self, settings: ArithmeticSettings | None = None, *, forgotten_carry_rate: float = 0.0):
        self.settings = settings or ArithmeticSettings()
        self._forgotten_carry_rate = forgotten_carry_rate
        self._digits = range(self.settings.min_digits, self.settings.max_digits + 1)
        self._weights = [digits**-self.settings.weight_power for digits in self._digits]

    @property
    def fingerprint(self) -> str:
        """Identifies the settings of the task; streams refuse to resume with another fingerprint."""
        options = asdict(self.settings) | {"forgotten_carry_rate": self._forgotten_carry_rate}
        return f"{NAME} {sorted(options.items())}"

    def problem(self, random: Random) -> Prompt:
        """Two numbers with the same random number of digits."""
        digits = random.choices(self._digits, self._weights)[0]
        low = 10 ** (digits - 1) if digits > 1 else 0
        return addition(random.randrange(low, 10**digits), random.randrange(low, 10**digits))

    def demonstration(self, prompt: Prompt, random: Random) -> str:
        """The written-out addition, with the teacher's mistakes."""
        question = prompt.messages[-1].content.rpartition(ANSWER_MARK)[2]  # after a hint
        first, second = question.removesuffix("=").split("+")
        return work_out(first, second, random, self._forgotten_carry_rate)


def addition(first: int, second: int) -> Prompt:
    """The prompt that asks for `first + second`. Both orders of a sum have the same split key."""
    low, high = sorted((first, second))
    question = f"{first}+{second}="
    return Prompt(
        id=f"{NAME}/{first}+{second}",
        source=NAME,
        messages=(Message(role="user", content=question),),
        answer=str(first + second),
        metadata={SPLIT_KEY: f"{low}+{high}", "digits": str(max(len(str(first)), len(str(second))))},
    )


def hinted(prompt: Prompt) -> Prompt:
    """The same problem with its answer and a bar before the question."""
    question = prompt.messages[-1]
    return replace(prompt, messages=(replace(question, content=f"{prompt.answer}{ANSWER_MARK}{question.content}"),))


def work_out(first: str, second: str, random: Random | None = None, forgotten_carry_rate: float = 0.0) -> str:
    """The written-out addition of two decimal numbers; it forgets carries at this rate."""
    width = max(len(first), len(second))
    carry, steps, answer = 0, [], ""
    for a, b in zip(reversed(first.zfill(width)), reversed(second.zfill(width)), strict=True):
        if carry and steps and random is not None and random.random() < forgotten_carry_rate:
            carry = 0
        total = int(a) + int(b) + carry
        steps.append(f"{a}+{b}+{carry}={total:02d}")
        carry, digit = divmod(total, 10)
        answer = f"{digit}{answer}"
    if carry:
        answer = f"{carry}{answer}"
    return ",".join(steps) + ANSWER_MARK + answer


def verify(prompt: Prompt, response: str) -> float:
    """1 if the text after the last bar is exactly the answer, else 0."""
    _, mark, answer = response.rpartition(ANSWER_MARK)
    return float(bool(mark) and answer == prompt.answer)
