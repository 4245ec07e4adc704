"""Turns the data of a microbatch into the input of a stage: attention masks from lengths, pixel values from bytes."""
