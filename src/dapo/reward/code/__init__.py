"""The code reward: programs out of responses, run against tests in a sandbox.

``scorer.py`` is what the rest of the program sees. Its workers (``score.py``) take the program out of the response
(``blocks.py``) and judge it (``grade.py``): ``sandbox.py`` runs it under bubblewrap, and ``evaluator.py`` evaluates the
tests outside of the sandbox, on plain copies of the values that the program returns (``values.py``, ``runner.py``).
"""
