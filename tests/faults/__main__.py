"""The campaign: `python -m tests.faults --help`."""

import sys

from .test_faults import main

sys.exit(main())
