"""Seconds of single layers, by curves over tokens: from a cluster's description, or measured."""
