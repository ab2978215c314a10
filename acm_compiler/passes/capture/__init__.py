"""Capture: a live model seen as a graph of torch-level calls, and left as it was."""
