"""`python -m profiler.cli`."""

from profiler.cli.app import main

main()
