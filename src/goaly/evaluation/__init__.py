"""Evaluation: the problems of the evaluation sets, and the scores of a policy on them."""
