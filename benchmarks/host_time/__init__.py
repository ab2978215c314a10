"""Microseconds of the host per ACM without a GPU: `python -m benchmarks.host_time`."""
