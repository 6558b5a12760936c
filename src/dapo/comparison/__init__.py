"""``dapo compare``: recipes times seeds as runs in one folder, equal in data and budget, and what came of them.

``recipes.py`` says what has to be the same; ``folder.py`` what lies where; ``cells.py`` starts the process of each
cell, ``cell.py``, one after the other; ``table.py`` counts, by ``statistics.py``; ``wins.py`` has answers judged in
pairs; ``pages.py`` writes.
"""
