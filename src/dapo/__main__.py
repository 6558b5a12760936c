"""``python -m dapo`` is ``dapo``."""

from dapo.commands import main

main()
