"""Hints of live traffic: what a teacher sees before a turn that the policy did not, made of what was said afterwards.

The teacher's context is the turn's conversation with another last message. `loss.distill` learns from it.
"""

from collections.abc import Callable
from dataclasses import replace

from goaly.agents.turn import RecordedTurn
from goaly.live.settings import LiveHintSettings
from goaly.live.turn import LiveTurn
from goaly.prompts.template import text_of
from goaly.prompts.tokenizer import ChatTokenizer

TeacherSees = Callable[[LiveTurn, RecordedTurn], list[int] | None]
"""The tokens that a teacher sees before a turn; None: those that the policy saw."""


def teacher_sees(settings: LiveHintSettings | None, chat: ChatTokenizer, row_length: int) -> TeacherSees:
    """The contexts of turns whose reactions have a text, if they fit in a row."""

    def context(turn: LiveTurn, recorded: RecordedTurn) -> list[int] | None:
        request, said = recorded.request, [one.corrected or one.text for one in turn.reactions]
        texts = [text for text in said if text]
        if settings is None or not texts or not request.messages:
            return None
        last = request.messages[-1]
        known = {
            "question": text_of(last.content or ""),
            "response": text_of(recorded.answer.content or ""),
            "reaction": texts[-1],
        }
        hinted = (*request.messages[:-1], replace(last, content=settings.text.format(**known)))
        tokens = chat.encode(chat.render_text(hinted, True, request.tools, request.template_args))
        return tokens if len(tokens) + len(recorded.tokens) <= row_length else None

    return context
