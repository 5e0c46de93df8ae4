"""Coding tasks and their grades: what a task is, the forms in which it is published, patches, and hidden tests.

`task.py` has the records, and the files `*_format.py` read tasks as others publish them. `preparation.py` makes the
clean state of a task, and `grader.py` judges a patch in a fresh sandbox of that state.
"""
