"""What if the tree had been another? Answered from a run's files, by the tree policies themselves, without a model."""
