"""``dapo doctor``: a mistake is found in the first seconds, not after the first hour.

Each check is a function of a :class:`~dapo.checks.context.CheckContext` that yields findings; ``checklist.py`` has
the list of them and runs each with a deadline."""
