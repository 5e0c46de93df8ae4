"""Our coding agents with a policy whose answers are known, in a real sandbox."""

import pytest
from scripted_chat import SUBMIT, ScriptedChat, bash, block, calls, text

from goaly.agents.session import SessionExhausted
from goaly.coding.agent import BLOCK_REMINDER, CALL_REMINDER, End, by_text, by_tools
from goaly.coding.command_blocks import command_blocks
from goaly.coding.settings import CodingSettings
from goaly.coding.tools import Tools
from goaly.generate.policy import ContextFull, PromptFillsContext
from goaly.prompts.prompt import Message
from goaly.sandboxes.sandbox import Sandbox

ASKED = (Message(role="user", content="Fix it."),)
WORKDIR = "/tmp/work"


async def attempt(agent, sandbox: Sandbox, *answers, asked=ASKED, **settings) -> tuple[End, ScriptedChat]:
    chat, chosen = ScriptedChat(*answers), CodingSettings(**settings)
    async with Tools(sandbox, WORKDIR, chosen) as tools:
        return await agent(asked, chat, tools, chosen, WORKDIR), chat


async def test_calls_are_answered_in_order_until_the_policy_submits(sandbox: Sandbox):
    two = calls(("edit", {"path": "a", "new": "text\n"}), ("bash", {"command": "cat a"}))
    end, chat = await attempt(by_tools, sandbox, two, bash("cat a"), SUBMIT)
    assert end is End.SUBMITTED
    system, asked, answer, created, shown = chat.shown[1]
    assert WORKDIR in system.content
    assert (asked, answer) == (*ASKED, two)
    assert [(one.role, one.tool_call_id, one.content) for one in (created, shown)] == [
        ("tool", "call_0", "created a"),
        ("tool", "call_1", "text\n"),
    ]
    assert chat.last == "text\n"


async def test_nothing_is_done_after_submit(sandbox: Sandbox):
    end, _ = await attempt(by_tools, sandbox, calls(("submit", {}), ("bash", {"command": "touch late"})))
    assert end is End.SUBMITTED
    assert not (await sandbox.run(["ls", "late"], cwd=WORKDIR)).ok


@pytest.mark.parametrize(("agent", "reminder"), [(by_tools, CALL_REMINDER), (by_text, BLOCK_REMINDER)])
async def test_answers_without_a_call_get_reminders_and_then_the_attempt_ends(sandbox: Sandbox, agent, reminder: str):
    end, chat = await attempt(agent, sandbox, *[text("Hm.")] * 3, reminders=2)
    assert end is End.NO_CALLS
    assert [one.content for one in chat.shown[-1]][-3:] == [reminder, "Hm.", reminder]


async def test_reminders_are_counted_anew_after_a_call(sandbox: Sandbox):
    end, _ = await attempt(by_tools, sandbox, text("Hm."), bash("true"), text("Hm."), SUBMIT, reminders=1)
    assert end is End.SUBMITTED


@pytest.mark.parametrize("wrong", ["```bash\nls\n```\n```bash\npwd\n```", "```python\nprint()\n```", "ls"])
async def test_an_answer_without_exactly_one_block_of_commands_gets_a_reminder(sandbox: Sandbox, wrong: str):
    end, chat = await attempt(by_text, sandbox, text(wrong), block("echo next"), block("submit"))
    assert end is End.SUBMITTED
    assert chat.shown[1][-1].content == BLOCK_REMINDER
    assert chat.last == "next\n"


async def test_a_block_may_have_several_lines_and_heredocs(sandbox: Sandbox):
    commands = "cat > a.py <<'END'\nprint('```')\nEND\npython3 a.py"
    _, chat = await attempt(by_text, sandbox, block(commands), block("submit"))
    assert chat.last == "```\n"


@pytest.mark.parametrize(
    ("answer", "blocks"),
    [
        ("```python\nprint()\n```\nrm -rf x\n```bash\nls\n```\n", ["ls\n"]),
        ("```bash\r\nls\r\npwd\r\n```\r\n", ["ls\npwd\n"]),
        ("````sh\necho '\n```\n'\n````", ["echo '\n```\n'\n"]),
        ("  ```Shell title=x\n  ls\n   pwd\nid\n ```", ["ls\n pwd\nid\n"]),
        ("```bash\n```sh\nls\n```", ["```sh\nls\n"]),
        ("````markdown\n```bash\nrm x\n```\n````", []),
        ("    ```bash\n    ls\n    ```", []),
        ("```bash\nls", []),
        ("use ```bash\nls\n```", []),
        ("```\n```\n``` BASH\nls\n````", ["", "ls\n"]),
        ("```bash``` is a shell\n```bash\nls\n```", ["ls\n"]),
    ],
)
def test_blocks_of_commands_are_fenced_as_in_markdown(answer: str, blocks: list[str]):
    assert command_blocks(answer) == blocks


async def test_prose_and_blocks_of_other_languages_are_never_run(sandbox: Sandbox):
    answer = "```python\nprint()\n```\necho prose\n```bash\necho run\n```\n"
    end, chat = await attempt(by_text, sandbox, text(answer), block("submit"))
    assert (end, chat.last) == (End.SUBMITTED, "run\n")


@pytest.mark.parametrize("agent", [by_tools, by_text])
@pytest.mark.parametrize(
    ("limit", "how"), [(ContextFull("full"), End.CONTEXT), (SessionExhausted("enough"), End.TURNS)]
)
async def test_a_limit_of_the_chat_ends_the_attempt(sandbox: Sandbox, agent, limit: Exception, how: End):
    end, _ = await attempt(agent, sandbox, bash("true") if agent is by_tools else block("true"), limit)
    assert end is how


async def test_a_task_that_fills_the_context_at_once_is_an_error(sandbox: Sandbox):
    with pytest.raises(PromptFillsContext):
        await attempt(by_tools, sandbox, PromptFillsContext("too long"))


@pytest.mark.parametrize(("agent", "answer"), [(by_tools, bash("true")), (by_text, block("true"))])
async def test_turns_are_limited(sandbox: Sandbox, agent, answer: Message):
    end, chat = await attempt(agent, sandbox, *[answer] * 3, turns=2)
    assert (end, len(chat.shown)) == (End.TURNS, 2)


@pytest.mark.parametrize(
    ("instructions", "asked", "expected"),
    [
        ("Work in {workdir}.", ASKED, "Work in /tmp/work."),
        ("", ASKED, None),
        ("Ours.", (Message(role="system", content="Theirs."), *ASKED), "Theirs."),
    ],
)
async def test_the_system_message_is_the_prompts_or_that_of_the_settings(
    sandbox: Sandbox, instructions: str, asked: tuple[Message, ...], expected: str | None
):
    _, chat = await attempt(by_tools, sandbox, SUBMIT, asked=asked, instructions=instructions)
    assert [one.content for one in chat.shown[0] if one.role == "system"] == ([] if expected is None else [expected])
