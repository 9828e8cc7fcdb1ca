"""``python -m relax_profiling`` is the ``relax-profile`` command."""

import sys

from relax_profiling.cli import main

sys.exit(main())
