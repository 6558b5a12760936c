"""``dapo demo``: a small model learns to think, from nothing, on a laptop's CPU.

It makes its own data, tokenizer and model, warms the model up by imitation, hands it to the ordinary training loop
with the recipe ``cpu-demo.yaml``, and shows what changed.
"""

from dapo.demo.run import run_demo

__all__ = ["run_demo"]
