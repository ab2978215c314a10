"""Calls of the operators on CUDA devices: first calls and kept plans, graphs that are taken apart, warm-up."""
