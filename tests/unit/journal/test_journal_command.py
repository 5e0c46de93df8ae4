"""`python -m goaly.journal` as a user calls it."""

import subprocess
import sys
from pathlib import Path

import pytest
from logged_run import LoggedRun

from goaly.backlog.ledger import State
from goaly.journal.__main__ import STATES, main

Capture = pytest.CaptureFixture[str]


def ids(text: str) -> list[str]:
    """The first column of the table."""
    return [line.split()[0] for line in text.splitlines()[1:] if line[0].isdigit() and " episodes" not in line]


def test_help_comes_without_torch() -> None:
    imported = "print({'torch', 'vllm', 'torchtitan', 'pydantic'} & set(sys.modules))"
    code = f"import atexit, sys; atexit.register(lambda: {imported}); from goaly.journal.__main__ import main; "
    command = [sys.executable, "-c", f"{code}main(['show', '--help'])"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--tokens" in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"


def test_reading_episodes_imports_neither_engine() -> None:
    code = "import sys, goaly.journal.page; print({'vllm', 'torchtitan', 'monarch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_states_to_choose_from_are_those_of_the_ledger() -> None:
    assert set(STATES) == set(State)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", "5.1 5.0 4.1 4.0 3.1 3.0 2 1.1 1.0 0.1 0.0"),
        ("--limit 2", "5.1 5.0"),
        ("--limit 0 --state trained --step 2", "4.1 4.0 3.1 3.0"),
        ("--state failed", "2.1"),
        ("--state running", "7 6.1"),
        ("--state rejected", ""),
        ("--prompt p1", "1.1 1.0"),
        ("--sort reward --limit 2", "4.1 5.0"),
        ("--sort length --limit 2", "4.1 4.0"),
        ("--sort staleness --limit 2", "3.1 3.0"),
    ],
)
def test_list_has_the_episodes_that_were_asked_for_in_their_order(
    folder: Path, capsys: Capture, options: str, expected: str
) -> None:
    assert main(["list", str(folder), *options.split()]) == 0
    assert ids(capsys.readouterr().out) == expected.split()


def test_list_says_what_became_of_each_episode_and_of_the_run(folder: Path, capsys: Capture) -> None:
    assert main(["list", str(folder), "--limit", "7"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in out.splitlines()}
    assert lines["4.0"][1:] == ["trained", "2", "p4", "s", "0.5", "+1", "4", "in", "3", "1", "61/231", "1", "0"]
    assert lines["5.1"][1:] == ["queued", "-", "p5", "s", "1", "-", "1", "-", "6/14", "2", "-"]
    assert " RuntimeError: <b>the tool</b> is gone\\x1b[31m\n" in out  # whatever text is in it
    assert out.splitlines()[-1] == (
        "7 of 11 episodes; policy version 2; prompts: 1 failed, 1 queued, 2 running, 4 trained"
    )


def test_show_has_the_tree_and_each_turn_once(folder: Path, capsys: Capture) -> None:
    assert main(["show", str(folder), "--episode", "4.0"]) == 0
    out = capsys.readouterr().out
    assert "├─ turn 3 | environment | 28 tokens, masked\n" in out
    assert "└─ turn 7 (new root) | prompt | 28 tokens, masked\n" in out
    headings = [line for line in out.splitlines() if line.startswith("---")]
    authors = "prompt policy environment policy environment policy prompt policy"
    assert [line.split(" | ")[1] for line in headings] == authors.split()
    assert headings[1].endswith("| version 1 | staleness 0 | mean log-prob -0.500 | advantage +1 | calls add")
    assert headings[3].endswith(" | reward 0.5")
    assert headings[5].endswith(" | malformed calls: 1 | reward 0.5")
    assert out.count("I call <tool_call>{}</tool_call><|im_end|>\n") == 1
    assert "tools offered: add\n" in out


def test_show_of_a_ticket_is_all_its_episodes_and_of_nothing_the_newest(folder: Path, capsys: Capture) -> None:
    assert main(["show", str(folder), "--episode", "3"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("episode ")] == [
        "episode 3.0: trained, step 2",
        "episode 3.1: trained, step 2",
    ]
    assert main(["show", str(folder)]) == 0
    assert capsys.readouterr().out.startswith("episode 5.1: queued\nprompt p5, source s, environment shop\n")


def test_show_with_tokens_has_a_line_for_each_token(folder: Path, capsys: Capture) -> None:
    assert main(["show", str(folder), "--episode", "3.0", "--tokens"]) == 0
    lines = capsys.readouterr().out.splitlines()
    headings = next(line for line in lines if line.startswith("at "))
    assert headings.split() == "at token text log-prob version stale reward reference advantage".split()  # noqa: SIM905
    rows = {line.split()[0]: line.split()[2:] for line in lines if line[:1].isdigit() or line[:1] == " "}
    assert rows["0"] == ["'q'", "-", "-", "-", "-", "-", "-"]
    assert rows["8"] == ["'f'", "-0.25", "0", "1", "-", "-0.75", "1"]
    assert rows["28"] == ["'<|im_end|>'", "-0.25", "1", "0", "1", "-0.75", "1"]


def test_show_has_the_notes_of_a_script_behind_the_answers_that_they_are_about(folder: Path, capsys: Capture) -> None:
    assert main(["show", str(folder), "--episode", "3.0"]) == 0
    text = capsys.readouterr().out
    begin, first, work, second, patch, grade = map(
        text.index, (">>> begin", "first", ">>> bash | exit code 1 | 0.25 s\n", "second", ">>> patch", ">>> grade")
    )
    assert begin < first < work < second < patch < grade
    assert "  command:\n    pytest -q\n    ls\n" in text
    assert "  changes:\n    a.py +3 -1\n" in text
    assert ">>> grade | score 1.0 | resolved True\n" in text
    assert "\x1b" not in text


def test_show_prints_the_patch_of_an_episode_alone(folder: Path, capsys: Capture) -> None:
    assert main(["show", str(folder), "--episode", "3.0", "--patch"]) == 0
    assert capsys.readouterr().out == "--- a/a.py\n+++ b/a.py\n"
    assert main(["show", str(folder), "--episode", "3.1", "--patch"]) == 2
    assert "--episode=3.1: has no patch" in capsys.readouterr().err


def test_what_a_policy_wrote_cannot_control_the_terminal(folder: Path, capsys: Capture) -> None:
    for tokens in ([], ["--tokens"]):
        assert main(["show", str(folder), "--episode", "4.1", *tokens]) == 0
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\u202e" not in out
    assert main(["show", str(folder), "--episode", "2"]) == 0
    out = capsys.readouterr().out
    assert "episode 2.1: failed (RuntimeError: <b>the tool</b> is gone\\x1b[31m)\n" in out
    assert "(abandoned, RuntimeError: <b>the tool</b> is gone\\x1b[31m)" in out
    assert "oops" in out


def test_what_a_pruned_log_lacks_is_said(pruned: LoggedRun, capsys: Capture) -> None:
    assert main(["list", str(pruned.folder)]) == 0
    out = capsys.readouterr().out
    assert ids(out) == ["5.1", "5.0", "4.1", "4.0", "3.1", "3.0", "2"]
    assert (
        "The log begins at policy version 1: older records were deleted (checkpoint.keep_log=false). Not here: 2 t"
        in out
    )
    assert main(["show", str(pruned.folder), "--episode", "0.1"]) == 2
    assert "--episode=0: was deleted with all that ended before policy version 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("episode", "problem"),
    [
        ("3.7", "--episode=3.7: ticket 3 has the episodes 3.0, 3.1\n"),
        ("80", "--episode=80: is not in the log, which has the tickets 0 to 7\n"),
    ],
)
def test_an_unknown_episode_is_one_clear_error(folder: Path, capsys: Capture, episode: str, problem: str) -> None:
    assert main(["show", str(folder), "--episode", episode]) == 2
    assert capsys.readouterr() == ("", problem)


def test_a_wrong_command_line_is_one_clear_error(tmp_path: Path, capsys: Capture) -> None:
    assert main(["list", str(tmp_path)]) == 2
    assert capsys.readouterr() == ("", f"{tmp_path}: must be the folder of a run with a log; it has no config.yaml\n")
    with pytest.raises(SystemExit) as ended:
        main(["show", str(tmp_path), "--episode", "x"])
    assert ended.value.code == 2
    assert "'x' must be TICKET.SAMPLE or TICKET, such as 17.3" in capsys.readouterr().err


def test_export_writes_every_trajectory_that_entered_the_queue(tmp_path: Path, capsys: Capture) -> None:
    run = LoggedRun(tmp_path)
    assert main(["export", str(run.folder)]) == 0
    file = run.folder / "rollouts.jsonl"
    assert capsys.readouterr().out == f"12 trajectories in {file}\n"
    assert len(file.read_text().splitlines()) == 12
