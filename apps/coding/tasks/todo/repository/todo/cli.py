"""The commands."""

import argparse
import sys
from datetime import date

from todo.files import FileError, load, save
from todo.tasks import UnknownTask


def iso_date(text):
    """The text if it is a date such as 2024-05-03."""
    return date.fromisoformat(text).isoformat()


def parser():
    """The parser of the command line."""
    main = argparse.ArgumentParser(prog="todo")
    main.add_argument("--file", required=True)
    commands = main.add_subparsers(dest="command", required=True)
    add = commands.add_parser("add")
    add.add_argument("text")
    add.add_argument("--due", type=iso_date)
    commands.add_parser("list").add_argument("--all", action="store_true")
    for name in ("done", "remove"):
        commands.add_parser(name).add_argument("ids", type=int, nargs="+", metavar="ID")
    edit = commands.add_parser("edit")
    edit.add_argument("id", type=int, metavar="ID")
    edit.add_argument("text")
    return main


def run(todo, options):
    """Do what a command says to a list; return whether the list changed."""
    if options.command == "list":
        for task in todo.shown(options.all):
            print(f"{task.id} [{'x' if task.done else ' '}] {task.text}" + (f" ({task.due})" if task.due else ""))
        return False
    if options.command == "add":
        print(todo.add(options.text, options.due or "").id)
        return True
    if options.command == "edit":
        todo.get(options.id).text = options.text
        return True
    for id in options.ids:
        try:
            if options.command == "done":
                todo.get(id).done = True
            else:
                todo.remove(id)
        except UnknownTask:
            print(f"no task {id}")
    return True


def main(arguments=None):
    """Run a command line and return the exit status."""
    options = parser().parse_args(arguments)
    try:
        todo = load(options.file)
        if run(todo, options):
            save(options.file, todo)
    except (FileError, OSError) as error:
        print(f"todo: {error}", file=sys.stderr)
        return 1
    except UnknownTask as error:
        print(f"no task {error}")
    return 0
