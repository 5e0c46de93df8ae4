"""The tasks of a list."""

from dataclasses import dataclass, field


class UnknownTask(KeyError):
    """There is no task with this id."""


@dataclass
class Task:
    """One thing to do; `due` is an ISO date or empty."""

    id: int
    text: str
    due: str = ""
    done: bool = False


@dataclass
class TodoList:
    """Tasks in the order in which they were added."""

    tasks: list = field(default_factory=list)

    def add(self, text, due=""):
        """Add a task and return it."""
        task = Task(len(self.tasks) + 1, text, due)
        self.tasks.append(task)
        return task

    def get(self, id):
        """The task with this id."""
        for task in self.tasks:
            if task.id == id:
                return task
        raise UnknownTask(id)

    def remove(self, id):
        """Remove a task."""
        self.tasks.remove(self.get(id))

    def shown(self, all=False):
        """The open tasks, or all of them, as they are listed."""
        tasks = [task for task in self.tasks if all or not task.done]
        return sorted(tasks, key=lambda task: (task.due or "9999", task.id))
