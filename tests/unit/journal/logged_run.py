"""The folder of a small run whose log the queue has written: an episode in each state, and one with branches."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from goaly.agents.session import Session, SessionEnd
from goaly.backlog.events import Dropped
from goaly.backlog.group_queue import GroupQueue
from goaly.backlog.settings import BacklogSettings
from goaly.base.config import to_yaml
from goaly.generate.policy import Completion
from goaly.generate.request import Finish
from goaly.journal.records import Drawn, Record
from goaly.journal.run_log import RunLog, RunState, delete_before
from goaly.prompts.prompt import Message, Prompt
from goaly.prompts.tokenizer import ChatTokenizer
from goaly.reward.settings import AdvantageSettings
from goaly.trajectory import ENVIRONMENT, POLICY, PROMPT, Group, Outcome, Trajectory, Turn, token_data

BACKLOG = BacklogSettings(groups_per_step=2, group_size=2, max_staleness=4, window=4, row_length=512)
TOOL = {"type": "function", "function": {"name": "add"}}
STOP = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.arguments | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>&lt;\x1b[2J\u202eevil \N{PILE OF POO}"
)
FAILURE = "RuntimeError: <b>the tool</b> is gone\x1b[31m"

NOTES = (
    {"kind": "begin", "after": 0},
    {
        "tool": "bash",
        "command": "pytest -q\nls",
        "output": HOSTILE + "\nend\n",
        "exit_code": 1,
        "seconds": 0.25,
        "changes": {"a.py": "+3 -1"},
        "after": 1,
    },
    {"kind": "patch", "patch": "--- a/a.py\n+++ b/a.py\n", "after": 2},
    {"kind": "grade", "score": 1.0, "resolved": True, "after": 2},
)


def write_model(folder: Path) -> Path:
    """A model folder with only a tokenizer, of one token for each byte."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Bytes
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    folder.mkdir(parents=True)
    tokenizer = Tokenizer(BPE({byte: at for at, byte in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = Bytes()
    tokenizer.add_special_tokens(["<|im_start|>", STOP])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": STOP, "chat_template": TEMPLATE}))
    return folder


class LoggedRun:
    """A run that has trained two steps: tickets 0 and 1, then 3 and 4. Ticket 2 failed after 2.1 had answered, 5 is
    queued, 6 and 7 run, and an episode of 6 has answered once. 4.0 has three trajectories, 4.1 hostile text."""

    def __init__(self, folder: Path):
        self.chat = ChatTokenizer(write_model(folder / "model"))
        self.folder = folder / "run"
        self.folder.mkdir()
        settings = {"model": {"path": str(folder / "model")}, "backlog": BACKLOG, "advantages": AdvantageSettings()}
        (self.folder / "config.yaml").write_text(to_yaml(settings))
        self._log = RunLog(self.folder / "log")
        self._queue = GroupQueue(BACKLOG, AdvantageSettings(), dp_ranks=1, pad_token=0, record=self._record)
        self._state = RunState(self._queue)
        asyncio.run(self._play())

    def prune(self) -> None:
        """Delete what resuming from version 1 does not need, as `checkpoint.keep_log=false` does."""
        delete_before(self.folder / "log", 1)

    def _record(self, record: Record) -> None:
        self._log.record(record)
        if hasattr(self, "_state"):
            self._state.follow(record)

    async def _play(self) -> None:
        for ticket in range(8):
            await self._queue.admit()
            message = Message(role="user", content=f"question {ticket}")
            prompt = Prompt(id=f"p{ticket}", source="s", messages=(message,), answer="42", tools=[TOOL])
            self._record(Drawn(ticket=ticket, prompt=prompt, mixture={}, learned=0))
        self._report(0, [self.said("one", reward=0.0), self.said("two", reward=1.0)])
        self._report(1, [self.said("three", reward=0.5), self.said("four", reward=0.25)])
        await self._train()
        snapshot = self._state.snapshot()
        assert snapshot is not None
        self._log.record(snapshot)
        self._queue.report(Dropped.failed(2, FAILURE))
        worked = self.said("first", "second", reward=1.0, versions=(0, 1))
        self._report(3, [replace(worked, notes=NOTES), self.said("no", reward=0.0)])
        self._report(4, [*self.branches(), self.said(HOSTILE, reward=-1.0, versions=(1,))])
        await self._train()
        self._report(5, [self.said("late", reward=0.0, versions=(1,)), self.said("later", reward=1.0, versions=(2,))])
        sessions = self.folder / "sessions"
        sessions.mkdir()
        with (sessions / "6.1.retry1.jsonl").open("w") as file:
            self._answer(
                Session(self.chat, prompt_id="p6", log=lambda one: file.write(json.dumps(one) + "\n")), [], "hm"
            )
            file.write('{"kind": "turn", "par')  # the worker is writing
        self._log.close()
        failed = self.folder / "failed"
        failed.mkdir()
        session = Session(self.chat, prompt_id="p2")
        self._answer(session, [], "oops")
        session.end(SessionEnd.ABANDONED)
        records = [*session.records(), {"kind": "failed", "why": FAILURE}]
        (failed / "2.1.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))

    def _report(self, ticket: int, samples: Sequence[Trajectory]) -> None:
        numbered, index = [], -1
        for one in samples:
            index += one.sample_index >= 0 or not numbered or numbered[-1].sample_index != index  # -1 goes on with it
            numbered.append(replace(one, prompt_id=f"p{ticket}", sample_index=index))
        self._queue.report(Group(ticket=ticket, prompt_id=f"p{ticket}", source="s", samples=tuple(numbered)))

    async def _train(self) -> None:
        batch = await self._queue.next_batch()
        assert batch is not None
        rows = self._queue.rows(batch.id, 0).rows
        self._queue.annotate(batch.id, 0, "reference_logprobs", torch.full(rows.batch_size, -0.75))
        self._queue.trained(batch.id, batch.id + 1)

    def said(self, *answers: str, reward: float, versions: Sequence[int] = (0,)) -> Trajectory:
        """A trajectory with these answers, each to a question; the reward is on its last token."""
        tokens: list[int] = []
        turns, trained, sampled = [], [], []
        for place, answer in enumerate(answers):
            for author, text in ((ENVIRONMENT if turns else PROMPT, "question"), (POLICY, answer + STOP)):
                ids = self.chat.encode(text)
                turns.append(Turn(author=author, start=len(tokens), stop=len(tokens) + len(ids)))
                tokens += ids
                trained += [author == POLICY] * len(ids)
                sampled += [versions[place] if author == POLICY else -1] * len(ids)
        columns = {
            "tokens": torch.tensor(tokens),
            "trained": torch.tensor(trained),
            "sampler_logprobs": torch.where(torch.tensor(trained), -0.25, 0.0),
            "sampler_versions": torch.tensor(sampled, dtype=torch.int32),
            "rewards": torch.tensor([0.0] * (len(tokens) - 1) + [reward]),
        }
        return trajectory(token_data(columns), tuple(turns))

    def branches(self) -> list[Trajectory]:
        """Three trajectories of one episode: after its first answer, a call, it goes on in two ways; and once anew."""
        session = Session(self.chat, prompt_id="p4")
        first = self._answer(session, [], "I call <tool_call>{}</tool_call>", calls=["add"])
        self._answer(session, first, "five")
        self._answer(session, first, "six", question="really?", malformed=1)
        self._answer(session, [], "from the beginning", question="a summary")
        made = session.trajectories(0.5)
        return [replace(one, sample_index=0 if place == 0 else -1) for place, one in enumerate(made)]

    def _answer(
        self,
        session: Session,
        before: Sequence[Mapping[str, Any]],
        text: str,
        *,
        question: str = "question",
        calls: Sequence[str] = (),
        malformed: int = 0,
    ) -> list[Mapping[str, Any]]:
        """Let the session record this answer; the conversation up to it."""
        asked = [*before, {"role": "user", "content": question}]
        continuation = session.extend(asked)
        tokens = torch.tensor(self.chat.encode(text + STOP))
        completion = Completion(
            prompt=continuation.prompt,
            tokens=tokens,
            logprobs=torch.full(tokens.shape, -0.5),
            versions=torch.ones(tokens.shape, dtype=torch.int32),
            finish=Finish.STOP,
            text=text,
        )
        called = [{"id": name, "function": {"name": name, "arguments": "{}"}} for name in calls]
        message = {"role": "assistant", "content": text.partition("<")[0], **({"tool_calls": called} if called else {})}
        session.record(continuation, completion, message, malformed=malformed)
        return [*asked, message]


def trajectory(tokens: Any, turns: tuple[Turn, ...]) -> Trajectory:
    """A trajectory whose group numbers it."""
    return Trajectory(
        tokens=tokens, prompt_id="p", sample_index=0, turns=turns, environment="shop", outcome=Outcome.COMPLETE
    )
