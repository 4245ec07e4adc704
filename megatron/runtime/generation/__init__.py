"""A trained model on one process: opened from a checkpoint or a folder of Hugging Face, and asked for answers."""
