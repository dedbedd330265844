"""Space of the store: slots reserved ahead of need, segments added, pages taken over."""
