"""Learners of sites: closed forms of every kind, training on inputs of their own, and which of them a site takes."""
