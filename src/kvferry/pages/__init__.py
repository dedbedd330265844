"""Page stores: where the bytes of pages live. `base` is the contract, `memory` the reference."""
