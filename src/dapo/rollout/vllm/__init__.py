"""vLLM as a rollout engine: for tensor parallelism, and for models that the native engine does not cover."""
