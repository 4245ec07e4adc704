"""Layers as torch modules: one file per kind of layer, the class that all kinds are, and the registry."""
