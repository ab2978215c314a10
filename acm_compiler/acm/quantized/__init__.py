"""Integer weights of learners: how they are made, and products with them in plain torch."""
