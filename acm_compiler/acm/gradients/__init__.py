"""Gradients of learners, and of the choice between them, at the cost of the learners that tokens run."""
