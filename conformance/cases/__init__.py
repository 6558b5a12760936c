"""All cases, by topic."""

from conformance.case import Case
from conformance.cases import clipping, correction, group, loss, rollout

CASES: tuple[Case, ...] = (*clipping.CASES, *loss.CASES, *correction.CASES, *group.CASES, *rollout.CASES)
