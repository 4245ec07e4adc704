"""Balance for loops that are not Braid's: any torch modules, over a process group (docs/balance.md)."""
