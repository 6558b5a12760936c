"""Models that rank and filter the outputs of others: scores, thresholds, best-of-n, drift."""
