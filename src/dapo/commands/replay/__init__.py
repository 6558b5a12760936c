"""A finished rollout step made again from what the run folder holds, and compared with what was recorded of it.

Nothing in a run folder is changed. ``stored`` reads a step, ``recompute`` makes rewards, shaping and advantages again
and looks at single samples, ``weights`` finds and makes the weights that an update started from, ``replay`` puts it
together."""
