"""Joins the stages: hosts, processes, actors, the tasks that drive them, and the shutdown."""
