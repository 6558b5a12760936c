"""One definition of a model for engine and trainer: loading, adapters, attention, head, export."""
