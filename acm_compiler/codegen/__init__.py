"""Kernels of the ACM operators, by device, and the comparison that judges them."""
