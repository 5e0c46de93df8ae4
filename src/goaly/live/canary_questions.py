"""Asks an arm one problem, and judges the answer: its score, its action and its length.

An answer is one turn. A problem with tools shows whether the policy calls one of them; the call is not made.
"""

import asyncio
import logging
from collections.abc import Mapping

from goaly.agents.answer_parser import AnswerParser
from goaly.base.errors import GoalyError, cause_of
from goaly.generate.policy import Policy, PromptFillsContext, TokenSampler
from goaly.generate.request import Sampling
from goaly.live.action_mix import ActionKind, action_of
from goaly.live.gate_records import JudgedAnswer
from goaly.live.traffic_split import Arm
from goaly.prompts.prompt import Prompt
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.rollout.evaluation_attempts import Verifier

logger = logging.getLogger(__name__)


class CanaryQuestions:
    """Asks the policies of both arms."""

    def __init__(
        self,
        samplers: Mapping[Arm, TokenSampler],
        chat: ChatTokenizer,
        parser: AnswerParser,
        verify: Verifier,
        *,
        sampling: Sampling,
        max_context: int,
        seconds: float,
    ):
        """`verify` gives the reward of an answer, of which [0, 1] counts. An answer that takes longer than `seconds`
        has the score 0."""
        self._samplers = samplers
        self._chat = chat
        self._parser = parser
        self._verify = verify
        self._sampling = sampling
        self._max_context = max_context
        self._seconds = seconds

    async def answer(self, arm: Arm, version: int, prompt: Prompt, name: str) -> JudgedAnswer | None:
        """The judged answer of this arm, whose replicas have at least this version. Requests of one `name` have the
        same seed on both arms. None if the judge could not score it."""
        policy = Policy(
            sampler=self._samplers[arm],
            name=f"{name}/{arm}",
            session=f"{name}/{arm}",
            sampling=self._sampling,
            min_version=version,
            max_context=self._max_context,
            decode=self._chat.decode,
            evaluation=True,
            seeds=name,
        )
        tokens = self._chat.render(prompt.messages, tools=prompt.tools)
        try:
            async with asyncio.timeout(self._seconds):
                completion = await policy.sample(tokens)
        except PromptFillsContext:
            return JudgedAnswer(score=0.0, action=ActionKind.ANSWER, length=0.0)
        except TimeoutError:
            logger.warning("%s: no answer within %g s", policy.name, self._seconds)
            return JudgedAnswer(score=0.0, action=ActionKind.ANSWER, length=1.0)
        message = self._parser.message(completion, prompt.tools or ())
        text = message.content or ""
        action = action_of(
            text,
            calls=len(message.tool_calls or ()),
            malformed=self._parser.malformed_calls(message, completion, prompt.tools or ()),
        )
        most = self._sampling.max_tokens or self._max_context
        try:
            score = await self._verify(prompt, text)
        except (GoalyError, TimeoutError) as error:
            logger.warning("%s: the answer has no score: %s", policy.name, cause_of(error))
            return None
        return JudgedAnswer(
            score=min(1.0, max(0.0, score)), action=action, length=min(1.0, len(completion.tokens) / most)
        )
