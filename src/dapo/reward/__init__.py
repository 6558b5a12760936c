"""Text into rewards: scorers by kind, worker processes, a server and its clients. Knows no tensor."""
