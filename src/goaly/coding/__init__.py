"""Coding agents: one works on a task in a sandbox, and hidden tests judge what it changed.

`task_files.py` finds tasks and makes prompts of them, `workspace.py` keeps their clean states, `tools.py` and
`agent.py` are the agent that works, and `episode.py` is one attempt.
"""
