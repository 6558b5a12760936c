"""The policy server: a model over HTTP, for people, agents and runs."""
