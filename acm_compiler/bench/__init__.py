"""Measuring time: contenders run interleaved in one process, compared by ratios."""
