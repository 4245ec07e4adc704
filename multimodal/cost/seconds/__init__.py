"""Seconds of single layers as curves over tokens: from a cluster's description, or measured."""
