"""What layers cost: one file per kind of layer, the class that all of them are, and the registry."""
