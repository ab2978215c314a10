"""Calls of the operators on CUDA devices: first calls and kept plans, graphs in which they are decomposed, warm-up."""
