"""Measuring a converted model: metric and MACs at several budgets, where its learners run, and the results as data."""
