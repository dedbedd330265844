"""What counters did lately. Counters begin again from zero when their process does."""

from collections import deque
from collections.abc import Mapping, Sequence

Counters = Mapping[str, float]


class History:
    """How much each counter grew, look by look, over the last `span_s`. One thread."""

    def __init__(self, span_s: float):
        self._span_s = span_s
        self._last: dict[str, float] = {}
        self._last_s: float | None = None
        self._grown: deque[tuple[float, float, dict[str, float]]] = deque()

    def add(self, now_s: float, counters: Counters) -> None:
        """What they are now. One that was not there before has not grown."""
        if self._last_s is not None and now_s > self._last_s:
            grown = {
                name: value - self._last[name] if value >= self._last[name] else value
                for name, value in counters.items()
                if name in self._last
            }
            self._grown.append((now_s, now_s - self._last_s, grown))
        self._last.update(counters)
        self._last_s = now_s
        while self._grown and self._grown[0][0] < now_s - self._span_s:
            self._grown.popleft()

    def grown(self, name: str, within_s: float) -> float:
        """By how much it grew within that time before the last look."""
        since_s = (self._last_s or 0.0) - within_s
        return sum(grown.get(name, 0.0) for at_s, _, grown in self._grown if at_s > since_s)

    def rate(self, name: str, within_s: float) -> float:
        """The same for each second that was looked at."""
        since_s = (self._last_s or 0.0) - within_s
        taken_s = sum(step_s for at_s, step_s, _ in self._grown if at_s > since_s)
        return self.grown(name, within_s) / taken_s if taken_s else 0.0

    @property
    def last_s(self) -> float | None:
        """The moment of the last look."""
        return self._last_s

    @property
    def first_s(self) -> float | None:
        """From when on growth is known; None: of no time."""
        return self._grown[0][0] - self._grown[0][1] if self._grown else None

    def spread(self, name: str, start_s: float, step_s: float, sums: list[float]) -> None:
        """Adds the growth to `sums`, one for each step from `start_s` on: what grew from one look
        to the next is spread evenly over the time between."""
        for at_s, taken_s, grown in self._grown:
            amount, begin_s = grown.get(name, 0.0), at_s - taken_s
            first = max(0, int((begin_s - start_s) // step_s))
            last = min(len(sums) - 1, int((at_s - start_s) // step_s))
            for index in range(first, last + 1) if amount else ():
                low_s = max(begin_s, start_s + index * step_s)
                high_s = min(at_s, start_s + (index + 1) * step_s)
                sums[index] += amount * max(0.0, high_s - low_s) / taken_s


def series(
    histories: Sequence[History], names: Sequence[str], step_s_min: float, point_count: int
) -> list[list[float]]:
    """Points in order of time, at most `point_count`: seconds before the last one, then for each
    counter its rate in all histories together. Ends where the one that is furthest back has ended,
    of those that still go on."""
    lasts = [history.last_s for history in histories if history.first_s is not None]
    if not lasts:
        return []
    start_s = min(history.first_s for history in histories if history.first_s is not None)
    end_s = min(last_s for last_s in lasts if last_s > max(lasts) - 2 * step_s_min)
    step_s = max(step_s_min, (end_s - start_s) / point_count)
    count = int((end_s - start_s) / step_s)
    start_s = end_s - count * step_s
    columns = []
    for name in names:
        sums = [0.0] * count
        for history in histories:
            history.spread(name, start_s, step_s, sums)
        columns.append([amount / step_s for amount in sums])
    times = [round((count - 1 - index) * step_s, 1) for index in range(count)]
    return [list(point) for point in zip(times, *columns, strict=True)]
