"""The forms of training data on disk, all of which are read as the same segments of text, images and audio."""
