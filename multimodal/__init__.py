"""What Braid decides: which sample goes where, where each layer lives, when each action runs."""
