"""Run time: budgets, fixed k, padding, and records of what ran."""
