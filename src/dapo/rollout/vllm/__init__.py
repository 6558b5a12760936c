"""vLLM as a rollout engine: its core in processes of its own, fed by the protocol, with weights that are checked."""
