"""A runner for work that takes no time."""

from typing import Any

from kvferry.catalog.runner import Runner, Ticket


class PromptRunner(Runner):
    """Work is done when it is submitted, on the caller's thread."""

    def submit(self, *arguments: Any) -> Ticket:
        ticket = super().submit(*arguments)
        self.step()
        return ticket
