"""A to-do list for the command line."""
