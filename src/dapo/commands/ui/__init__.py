"""The page over run folders: a server (``server.py``), its queries (``queries.py``) and plain files for the browser."""
