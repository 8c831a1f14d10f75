"""The trainer: policy, optimiser, training loop, checkpoints, the iteration row."""
