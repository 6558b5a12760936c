"""A paged cache and the runner over it: what the native engine has on a GPU."""
