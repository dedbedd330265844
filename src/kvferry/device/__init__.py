"""Copiers: between engine blocks and staging. `base` is the contract, `host` the CPU backend."""
