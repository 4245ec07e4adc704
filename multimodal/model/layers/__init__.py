"""Layers as torch modules: one file per kind of layer, their base class, and the registry."""
