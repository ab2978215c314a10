"""Small models of many makers, each with the truth about its sites, written from its source and not from our output."""
