"""KV cache straight from one engine to another: see `base` and `plan`."""
