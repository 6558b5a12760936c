"""The mathematics of DAPO: pure functions on tensors and records, each with the paper's equation number.

``admission`` (which groups are kept, Eq. 11), ``shaping`` (length, Eq. 13), ``advantage`` (Eq. 9), ``objective`` (the
clipped token-level loss, Eq. 8, 10 and 12) and ``kl``. Nothing here knows of configs, files, engines or processes, and
nothing but ``dapo.records`` is imported from the rest of the project.
"""
