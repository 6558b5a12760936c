"""``dapo demo``: a model learns on a laptop's CPU, as one may see and change.

``arithmetic``: a small model learns to think, from nothing. It makes its own data, tokenizer and model, warms the model
up by imitation, hands it to the ordinary training loop with the recipe ``cpu-demo.yaml``, and shows what changed.
``word-problems``: a pretrained model of 135 M parameters learns to solve word problems (``cpu-smollm2.yaml``)."""
