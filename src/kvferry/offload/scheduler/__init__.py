"""The scheduler half: what to look up, load and store. One thread, which nothing here blocks."""
