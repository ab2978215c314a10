"""Quantised weights: `acm.quantize`, and rounding to 4 bits that makes up for its own errors (docs/semantics.md)."""
