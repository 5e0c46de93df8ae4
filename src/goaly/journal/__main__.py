"""Shows the episodes of a run, also of one that goes on.

    python -m goaly.journal list RUN [--step N] [--prompt TEXT] [--state STATE] [--sort KEY] [--limit N] [--html FILE]
    python -m goaly.journal show RUN [--episode ID] [--tokens] [--patch] [--html FILE]
    python -m goaly.journal export RUN [--tokens]
    python -m goaly.journal versions RUN [--version N]

`list` has a line for each episode: what became of it and why, the step that trained it, its reward and advantage, and
the policy versions of its tokens. `show` has one of them turn by turn, as the policy saw it; with `--tokens` a line for
each token, with `--patch` only the change of files that a coding agent made. An ID is TICKET.SAMPLE; TICKET alone is
all samples of a prompt. `--html` writes the same episodes as one page that needs nothing else. `export` writes all
trajectories to RUN/rollouts.jsonl. `versions` names the versions that a live run has served, and the number of
conversations that each was trained on; with `--version` these conversations.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from goaly.base.errors import ConfigError, GoalyError

if TYPE_CHECKING:
    from goaly.journal.logged_episodes import LoggedEpisode, ReadEpisode, Reading
    from goaly.journal.run_folder import RunFolder

STATES = ("running", "queued", "trained", "rejected", "failed")
"""Those of `State`, which takes seconds to import."""
SORTS = ("newest", "reward", "length", "staleness")
LISTED, ON_PAGE = 20, 200
"""Episodes without `--limit`, in the terminal and on a page."""


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m goaly.journal", description=head, epilog=rest.rpartition("\n\n")[2], allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="list|show|export|versions")
    run = argparse.ArgumentParser(add_help=False)
    run.add_argument("run", type=Path, metavar="RUN", help="the folder of a run")
    page = argparse.ArgumentParser(add_help=False)
    page.add_argument("--html", type=Path, metavar="FILE", help="write a page instead, which needs no other file")
    listing = commands.add_parser("list", parents=[run, page], help="a line for each episode")
    listing.add_argument("--step", type=int, metavar="N", help="only those that step N trained")
    listing.add_argument("--prompt", metavar="TEXT", help="only those with this text in the id of their prompt")
    listing.add_argument("--state", choices=STATES, help="only those in this state; without it all but running ones")
    listing.add_argument(
        "--sort",
        choices=SORTS,
        default="newest",
        help="newest (default), lowest reward, longest or stalest first",
    )
    listing.add_argument("--limit", type=int, metavar="N", help=f"at most N ({LISTED}, on a page {ON_PAGE}); 0 is all")
    one = commands.add_parser("show", parents=[run, page], help="an episode turn by turn")
    one.add_argument("--episode", type=_episode, metavar="ID", help="TICKET.SAMPLE or TICKET; default: the newest")
    one.add_argument("--tokens", action="store_true", help="log-prob, version and staleness of each token")
    one.add_argument("--patch", action="store_true", help="only the change of files, in the form of git diff")
    written = commands.add_parser("export", parents=[run], help="all trajectories to RUN/rollouts.jsonl")
    written.add_argument("--tokens", action="store_true", help="also token ids and log-probs")
    served = commands.add_parser("versions", parents=[run], help="the served versions of a live run")
    served.add_argument("--version", type=int, metavar="N", help="the conversations that version N was trained on")
    return parser


def _episode(text: str) -> tuple[int, int | None]:
    found = re.fullmatch(r"(\d+)(?:\.(\d+))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be TICKET.SAMPLE or TICKET, such as 17.3")
    return int(found[1]), None if found[2] is None else int(found[2])


def _list(line: argparse.Namespace, run: "RunFolder") -> str:
    from goaly.journal.episode_text import table
    from goaly.journal.logged_episodes import read_log

    with_sessions = line.state in ("running", "failed")
    reading = read_log(run, sessions=with_sessions)
    chosen = _chosen(line, reading.episodes)
    limit = line.limit if line.limit is not None else (ON_PAGE if line.html else LISTED)
    listed = chosen[: limit or None]
    said = f"{len(listed)} of {len(chosen)} episodes" if len(listed) < len(chosen) else f"{len(chosen)} episodes"
    notes = [f"{said}; {_ends(reading)}", *_missing(reading)]
    if line.html is None:
        return (table(listed) if listed else "") + "".join(f"{note}\n" for note in notes)
    read = read_log(run, {one.ticket for one in listed}, sessions=with_sessions).read
    by_id = {one.facts.id: one for one in read}
    return _write_page(line.html, run, [(one, by_id.get(one.id)) for one in listed], notes)


def _chosen(line: argparse.Namespace, episodes: "Sequence[LoggedEpisode]") -> "list[LoggedEpisode]":
    """The episodes that the filters leave, in the order that was asked for."""
    found = [
        one
        for one in reversed(episodes)
        if (one.state == line.state if line.state else one.state != "running")
        and (line.step is None or one.step == line.step)
        and (line.prompt is None or line.prompt in one.prompt_id)
    ]
    match line.sort:
        case "reward":
            found.sort(key=lambda one: (one.reward is None, one.reward))
        case "length":
            found.sort(key=lambda one: -one.trained)
        case "staleness":
            found.sort(key=lambda one: -1 if one.staleness is None else one.staleness[1], reverse=True)
    return found


def _show(line: argparse.Namespace, run: "RunFolder") -> str:
    from goaly.journal.episode_text import shown
    from goaly.journal.logged_episodes import read_log

    ticket, sample = line.episode or _newest(run)
    reading = read_log(run, {ticket}, sessions=True)
    entries = [one for one in reading.tickets.get(ticket, []) if sample is None or one.sample in (None, sample)]
    if not entries:
        raise ConfigError([_unknown(ticket, sample, reading)])
    read = {one.facts.id: one for one in reading.read}
    if line.patch:
        return "".join(_patch(read.get(one.id), one) for one in entries)
    notes = _missing(reading)
    if line.html is not None:
        return _write_page(line.html, run, [(one, read.get(one.id)) for one in entries], notes)
    chat = run.tokenizer()
    parts = [
        shown(read[one.id], chat, tokens=line.tokens) if one.id in read else _without_tokens(one) for one in entries
    ]
    return "\n".join(parts) + "".join(f"\n{note}\n" for note in notes)


def _patch(read: "ReadEpisode | None", one: "LoggedEpisode") -> str:
    from goaly.journal.episode_text import safe
    from goaly.journal.notes import patches_of

    patches = [] if read is None else patches_of(read.trajectories)
    if not patches:
        raise ConfigError([f"--episode={one.id}: has no patch: no coding agent made one, or it changed nothing"])
    return "".join(safe(patch) if sys.stdout.isatty() else patch for patch in patches)


def _newest(run: "RunFolder") -> tuple[int, int | None]:
    """The newest episode with tokens."""
    from goaly.journal.logged_episodes import read_log

    for one in reversed(read_log(run).episodes):
        if one.sample is not None:
            return one.ticket, one.sample
    raise ConfigError([f"{run.path}: its log has no finished episode yet"])


def _unknown(ticket: int, sample: int | None, reading: "Reading") -> str:
    if entries := reading.tickets.get(ticket):
        return f"--episode={ticket}.{sample}: ticket {ticket} has the episodes {', '.join(one.id for one in entries)}"
    if reading.begins and ticket < min(reading.tickets, default=0):
        return (
            f"--episode={ticket}: was deleted with all that ended before policy version {reading.begins} "
            "(checkpoint.keep_log=false)"
        )
    first, last = min(reading.tickets, default=None), max(reading.tickets, default=None)
    return f"--episode={ticket}: is not in the log, " + (
        "which has no tickets" if first is None else f"which has the tickets {first} to {last}"
    )


def _without_tokens(one: "LoggedEpisode") -> str:
    from goaly.journal.episode_text import facts_of

    why = "its group failed before it chatted" if one.state.ended else "nothing is recorded yet: a log has whole groups"
    return f"{facts_of(one)}\nno tokens, because {why}\n"


def _ends(reading: "Reading") -> str:
    """How many tickets are in each state."""
    states = [entries[0].state for entries in reading.tickets.values() if entries]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    return f"policy version {reading.policy_version}; prompts: {counts or 'none'}"


def _missing(reading: "Reading") -> list[str]:
    """The facts that the log does not have."""
    notes = []
    if reading.begins:
        gone = ", ".join(f"{count} {why}" for why, count in reading.before.items() if count)
        notes.append(
            f"The log begins at policy version {reading.begins}: older records were deleted "
            f"(checkpoint.keep_log=false). Not here: {gone or 'no prompts'}; nor the texts of prompts whose groups "
            "were complete at that point."
        )
    if not reading.knows_advantages:
        notes.append("Advantages are unknown: the run's own function (advantages.name) cannot be imported here.")
    return notes


def _write_page(
    file: Path, run: "RunFolder", episodes: "list[tuple[LoggedEpisode, ReadEpisode | None]]", notes: list[str]
) -> str:
    from goaly.journal.page import page

    content = page(run.path.resolve().name, episodes, notes, run.tokenizer())
    file.write_text(content, encoding="utf-8")
    return "".join(f"{note}\n" for note in notes) + f"{file}: {len(episodes)} episodes, {len(content) / 1e6:.1f} MB\n"


def _export(line: argparse.Namespace, run: "RunFolder") -> str:
    from goaly.journal.export import export

    return export(run, tokens=line.tokens)


def _versions(line: argparse.Namespace, run: "RunFolder") -> str:
    from goaly.journal.attribution import Attribution

    found = Attribution(run.path)
    if line.version is None:
        rows = [f"version {one}: {len(found.seen_by(one))} conversations\n" for one in found.served]
        return "".join(rows) or "the run has no gate, so it serves every version\n"
    rows = [
        f"{one.session}  key {one.key}  user {one.user or '-'}  steps {', '.join(map(str, sorted(one.versions)))}\n"
        for one in found.seen_by(line.version)
    ]
    return "".join(rows) or f"version {line.version} was trained on no conversation\n"


COMMANDS = {"list": _list, "show": _show, "export": _export, "versions": _versions}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    line = arguments().parse_args(argv)
    try:
        from goaly.journal.run_folder import RunFolder

        sys.stdout.write(COMMANDS[line.command](line, RunFolder.of(line.run)))
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # the reader, such as `head`, has enough
    except (GoalyError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    from goaly.base.process import exit_quickly

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    exit_quickly(main())
