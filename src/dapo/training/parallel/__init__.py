"""The learner over several processes: ranks, how each holds the model, and the front that speaks for them."""
