"""A second connector beside kvferry, as under MultiConnector, whose loads are wrong: what it
loads, and what is computed on top of it, must never be stored."""

from kvferry.testing.clock import Chance
from kvferry.testing.world.requests import Load, SimRequest
from kvferry.testing.world.shape import BLOCK_TOKENS


class Sibling:
    """`chance_of_hit`: of each request, at its first admission and again after a preemption.
    It may have to be asked several times. `pending`: loads that have begun and end when somebody
    ends them."""

    def __init__(self, chance: Chance, chance_of_hit: float):
        self._chance = chance
        self._chance_of_hit = chance_of_hit
        self._offers: dict[tuple[str, int], int] = {}
        self._asks_left: dict[tuple[str, int], int] = {}
        self._load_count = 0
        self.pending: list[tuple[SimRequest, Load]] = []

    def match(self, request: SimRequest, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens`, in whole blocks; the same answer each time. None: it
        does not know yet."""
        name = (request.request_id, request.admission)
        if name not in self._offers:
            if self._chance_of_hit and self._chance.random() < 0.3:
                self._asks_left[name] = self._chance.choice([1, 3, 10])
            boundary = 0
            if self._chance.random() < self._chance_of_hit:
                boundary = self._chance.randrange(len(request.tokens)) // BLOCK_TOKENS
            self._offers[name] = boundary * BLOCK_TOKENS
        if self._asks_left.get(name):
            self._asks_left[name] -= 1
            return None
        return max(0, self._offers[name] - computed_tokens)

    def load(self, request: SimRequest, start: int, end: int) -> Load:
        self._load_count += 1
        label = f"sibling {request.request_id} {self._load_count}"
        return Load(start, end, (), label.encode())

    def is_prompt(self) -> bool:
        """Whether a load happens inside the step that admits the request."""
        return self._chance.random() < 0.5
