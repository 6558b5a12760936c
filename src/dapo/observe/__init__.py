"""What a run writes and what is read from it: run folder, metrics, samples, alarms, trackers, progress."""
