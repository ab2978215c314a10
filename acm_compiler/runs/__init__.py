"""Runs: plan and convert on one page (`pipeline`), a recipe carried out in a folder, what of a folder can be opened."""
