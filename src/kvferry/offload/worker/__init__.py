"""The worker half: moves what the plans of the scheduler half say, on a thread of its own."""
