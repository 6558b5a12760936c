"""A model by any of its names, with an engine: what evaluate, generate and the playground share."""
