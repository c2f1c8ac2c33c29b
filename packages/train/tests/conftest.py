"""Let the tests of this package import their shared stand-ins."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
