"""Learner, engines and reward in processes that Ray places and watches over. Ray is imported nowhere else."""
