"""Products on sm_90 by two groups of warps that take tiles in turn, while one more warp reads what they multiply."""
