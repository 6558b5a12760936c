"""``dapo report``: what a run was, what it learned, what it cost, as a page that can be sent to somebody.

``content.py`` says what is in it, as a list of sections; ``costs.py`` counts; ``figures.py`` draws; ``write.py`` says
what sections are made of, and writes them as one HTML file and as Markdown with plots.
"""
