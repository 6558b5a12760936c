"""``python -m dapo`` is ``dapo``."""

from dapo.cli import main

main()
