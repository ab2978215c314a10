"""Gradients of learners on a GPU: products over prefixes of the sorted tokens, without a look at k by the host."""
