"""A conformance suite for trainers of the DAPO and GRPO family: known inputs, known answers, on any implementation.

``python -m conformance --adapter dapo`` runs it; docs/conformance.md says what it holds and how to write an adapter.
The cases come from the DAPO paper, from arithmetic done by hand and from kinds of faults that users of public trainers
reported. None was computed with the code under test.
"""
