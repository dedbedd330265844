"""The offload connector without an engine: planner (scheduler half) and jobs (worker half)."""
