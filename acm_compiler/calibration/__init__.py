"""Conversion without training: learners, gates and the budget table from a few thousand unlabelled tokens."""
