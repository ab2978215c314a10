"""Load on a server of sentence vectors."""
