"""``dapo compare``: recipes times seeds as runs in one folder, equal in data and budget, and what came of them.

``recipes.py`` says what has to be the same, ``folder.py`` what lies where; ``cells.py`` starts a process for each cell,
``table.py`` counts what came of them, ``wins.py`` has answers judged in pairs, ``pages.py`` writes.
"""
