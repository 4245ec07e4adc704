"""What work costs: FLOPs of a model, peaks of hardware."""
