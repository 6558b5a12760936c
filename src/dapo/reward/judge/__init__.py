"""LLM as a judge: a language model behind an OpenAI-compatible endpoint grades responses by a rubric."""
