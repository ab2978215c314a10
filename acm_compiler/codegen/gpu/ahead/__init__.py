"""Kernels of a call, built for an architecture without a GPU: `forward`'s, `gradients`', and `build`."""
