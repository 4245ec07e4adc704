"""Processes that decode items for the ranks of a run, on this machine or others (DistTrain 4.3's producers and consumers)."""
