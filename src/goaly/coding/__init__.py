"""Coding tasks: a repository in a sandbox, an agent that changes it, and hidden tests that judge the change.

`task.py` has the records. `workspace.py` prepares a task's sandbox, `grading.py` judges a patch in a fresh one, the
files `*_format.py` read tasks as others publish them, `tools.py` and `agent.py` are the agent that works.
"""
