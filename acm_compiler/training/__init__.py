"""Training: one loop for all phases; a phase is what is run, a loss, and a parameter group."""
