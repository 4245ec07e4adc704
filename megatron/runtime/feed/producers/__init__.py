"""Processes that decode items for the ranks of a run, on this machine or others (DistTrain 4.3's producers and consumers)."""

from multimodal.values.errors import ConfigError, require_package

for _package in ("zmq", "safetensors"):
    require_package(_package, extra="producers", needed_by="producers, on both sides", error=ConfigError)
