"""Entry point of ``python -m residuum``."""

import sys

from residuum.cli.main import main

sys.exit(main())
