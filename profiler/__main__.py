"""`python -m profiler`, and under torchrun."""

from profiler.cli.app import main

if __name__ == "__main__":
    main()
