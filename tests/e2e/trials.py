"""Runs scenarios: without kvferry, with a store that is empty, and with one that is not."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e import models
from tests.e2e.engine import Answers, EngineProcess
from tests.e2e.scenarios import Round, Scenario
from tests.e2e.store import Store


@dataclass(frozen=True)
class Run:
    """One engine's answers to the rounds of a scenario, and what it counted over its life."""

    answers: tuple[Answers, ...]
    metrics: dict[str, float]
    facts: dict[str, Any]

    @property
    def tokens(self) -> list[tuple[tuple[int, ...], ...]]:
        return [answers.tokens for answers in self.answers]

    @property
    def external(self) -> list[int]:
        return [answers.external_hit_tokens for answers in self.answers]

    @property
    def local(self) -> list[int]:
        return [answers.local_hit_tokens for answers in self.answers]

    @property
    def preemptions(self) -> int:
        return sum(answers.preemptions for answers in self.answers)


@dataclass(frozen=True)
class Trial:
    """`again`: the plain engine's second answer to each prompt, one by one, so another shape of
    prefill and, where there is a prefix cache, vLLM's own hit."""

    scenario: Scenario
    store: Store
    plain: Run
    again: tuple[tuple[Answers, ...], ...]
    cold: Run
    warm: Run


def restart(process: EngineProcess) -> None:
    process.kill()
    process.start()


class Trials:
    """Each scenario is run once, when it is first asked for."""

    def __init__(self, one: EngineProcess, other: EngineProcess, model: Any, folder: Path):
        self._one = one
        self._other = other
        self._model = model
        self._folder = folder
        self._done: dict[str, Trial] = {}

    def of(self, scenario: Scenario) -> Trial:
        if scenario.name not in self._done:
            self._done[scenario.name] = self._run(scenario)
        return self._done[scenario.name]

    def restart(self) -> None:
        for process in (self._one, self._other):
            restart(process)

    def warm(self, trial: Trial) -> Run:
        """Another fresh engine on the store of a trial."""
        return self._answer(self._one, trial.scenario, trial.store)

    def _run(self, scenario: Scenario) -> Trial:
        folder = self._folder / scenario.name
        folder.mkdir()
        store = Store(folder)
        self._one.open(self._model(scenario.model), **scenario.settings)
        plain = self._finish(self._one, scenario)
        again = tuple(self._one_by_one(self._one, round_) for round_ in scenario.rounds)
        self._close(self._one, scenario)
        cold = self._answer(self._one, scenario, store, is_cold=True)
        warm = self._answer(self._other, scenario, store)
        return Trial(scenario, store, plain, again, cold, warm)

    def _answer(
        self, process: EngineProcess, scenario: Scenario, store: Store, *, is_cold: bool = False
    ) -> Run:
        process.open(self._model(scenario.model), **store.settings(), **scenario.settings)
        run = self._finish(process, scenario)
        if is_cold:
            process.wait_for_rest()
        self._close(process, scenario)
        return run

    def _close(self, process: EngineProcess, scenario: Scenario) -> None:
        process.close()
        if scenario.spoils_process:
            restart(process)

    def _finish(self, process: EngineProcess, scenario: Scenario) -> Run:
        answers = tuple(self._ask(process, round_) for round_ in scenario.rounds)
        return Run(answers, process.metrics(), process.facts())

    def _ask(self, process: EngineProcess, round_: Round) -> Answers:
        return process.generate(
            round_.prompts,
            max_tokens=round_.max_tokens,
            salts=round_.salts,
            loras=self._adapters(round_),
            allowed_token_ids=round_.allowed,
        )

    def _one_by_one(self, process: EngineProcess, round_: Round) -> tuple[Answers, ...]:
        return tuple(
            process.generate(
                [prompt],
                max_tokens=round_.max_tokens,
                salts=round_.salts[index : index + 1],
                loras=self._adapters(round_)[index : index + 1],
                allowed_token_ids=round_.allowed,
            )
            for index, prompt in enumerate(round_.prompts)
        )

    def _adapters(self, round_: Round) -> list[str | None]:
        return [name and str(self._adapter(name)) for name in round_.adapters]

    def _adapter(self, name: str) -> Path:
        target = self._folder / "adapters" / name
        if not target.exists():
            models.save_adapter(len(name), self._model("full"), target)
        return target
