"""Results as charts and one HTML page."""
