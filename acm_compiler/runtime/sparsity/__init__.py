"""Small values that learners skip, a token at a time (docs/semantics.md, Skipped values)."""
