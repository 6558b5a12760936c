"""``dapo doctor``: a mistake is found in the first seconds, not after the first hour.

Each check is a small function of a :class:`~dapo.checks.context.CheckContext` that yields
:class:`~dapo.checks.finding.Finding` records; ``examination.py`` has the list of them, runs them in order, each with a
deadline, and keeps one that fails from hiding the others or from dragging them along.
"""
