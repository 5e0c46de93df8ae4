"""Environments that episodes act in, each in a process of its own, behind one protocol."""
