"""Where each layer lives: planners, one file each, that turn a model graph and sizes into a Plan."""
