"""From a step's number to what a rank needs to run it, prepared ahead of training."""
