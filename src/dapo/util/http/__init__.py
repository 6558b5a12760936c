"""The client's side of HTTP: connections to servers of rewards, judges and policies, and what can go wrong."""
