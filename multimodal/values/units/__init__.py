"""The parts of a unit: its transformer layers, and the images or sounds that it takes, or that pass through several."""
