"""The forms in which training data lies on disk, all read as the same segments of text, images and audio."""
