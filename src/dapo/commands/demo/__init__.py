"""``dapo demo``: a small model learns to think on a laptop's CPU, from nothing, as one may see and change.

It makes its own data, tokenizer and model, warms the model up by imitation, hands it to the ordinary training loop with
the recipe ``cpu-demo.yaml``, and shows what changed."""
