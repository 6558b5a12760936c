"""``dapo report``: what a run was, what it learned, what it cost, as a page that can be sent to somebody.

``content.py`` says what is in it, as a list of sections; ``costs.py`` counts; ``figures.py`` draws; ``write.py`` makes
one HTML file, and Markdown with its plots, of the same sections.
"""
