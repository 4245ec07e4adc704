"""What a unit is made of: its transformer layers, and the images or sounds that it takes."""
