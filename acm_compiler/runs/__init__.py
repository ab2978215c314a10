"""Runs: a recipe carried out in a folder, and what of a folder can be opened again."""
