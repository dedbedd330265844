"""Catalogs: where a page probably is. `base` is the contract, `memory` the readable reference."""
