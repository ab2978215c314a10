"""Other ways to make a trained model cheaper, and our own beside them, on one user's model, data and count of MACs."""
