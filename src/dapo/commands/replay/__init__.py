"""A finished rollout step made again from what the run folder holds, and compared with what was recorded of it.

Nothing in a run folder is changed. ``stored`` reads a step, ``recompute`` makes rewards, shaping and advantages again,
``weights`` finds and makes the weights that an update started from, ``tokens`` looks at single samples, ``replay`` puts
it together.
"""
