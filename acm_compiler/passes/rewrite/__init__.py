"""Rewrite: ACMs put into live models and graphs, what a rewritten model remembers, and the way back."""
