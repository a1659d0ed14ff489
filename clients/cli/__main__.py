"""``python -m tokenbus.clients.cli``: the command ``tokenbus``."""

import sys

from .main import main

sys.exit(main())
