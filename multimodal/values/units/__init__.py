"""The parts of a unit's description: transformer layers, images or sound, experts, queries, adapters."""
