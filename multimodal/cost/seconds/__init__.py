"""Seconds of single layers: curves over tokens, from a cluster's description or measured, and what a layer takes by them."""
