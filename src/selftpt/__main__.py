"""`python -m selftpt` is `selftpt`."""

from selftpt.cli import main

main()
