"""`python -m deepinfer` is the command line."""

import sys

from deepinfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
