"""Entry point of `python -m profiler`, also under torchrun."""

from profiler.cli.app import main

if __name__ == "__main__":
    main()
