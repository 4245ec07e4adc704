"""What stages make of a microbatch before and when they take it: masks from lengths, values from bytes."""
