"""``dapo report``: what a run was, what it learned, what it cost, as a page that can be sent to somebody.

``content.py`` says what is in it, as a list of sections, which ``util/pages.py`` writes; ``figures.py`` draws.
"""
