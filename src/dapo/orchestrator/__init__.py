"""The loop: collects groups, builds batches, updates, hands weights over, saves and resumes."""
