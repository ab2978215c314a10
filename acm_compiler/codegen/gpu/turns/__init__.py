"""Warp-specialised products on sm_90, ping-pong: two groups of warps take tiles in turn, one more warp reads."""
