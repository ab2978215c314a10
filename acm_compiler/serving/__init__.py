"""Serving of a saved model over HTTP: requests in batches, budgets by load."""
