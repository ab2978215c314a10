"""`python -m acm_compiler` is `acmc`."""

from acm_compiler.cli import main

main()
