"""Run the command line with `python -m selftpt`."""

from selftpt.cli import main

main()
