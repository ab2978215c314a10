"""Graph passes: capture a live model, find its sites, rewrite it, and lower compiled graphs to ACM operators."""
