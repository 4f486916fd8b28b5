"""Conversations of agents: who comes when, says what, and is answered with how many tokens.

Drawn from a seed alone. A rate scales the times of arrival and nothing else, so every engine and
every load is asked the same.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Shape", "Talk", "Turn", "draw_talks", "read_text"]

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """How many conversations, and their means; lengths and turns lie within half of the mean."""

    talks: int = 32
    groups: int = 4  # conversations of a group share their system prompt
    turns: int = 4
    system_tokens: int = 512
    question_tokens: int = 96
    answer_tokens: int = 160
    think_s: float = 1.0  # exponential


@dataclass(frozen=True)
class Turn:
    """One request: it follows the answer before it by ``think_s``, 0 for the first."""

    question: Tokens
    answer_tokens: int
    think_s: float


@dataclass(frozen=True)
class Talk:
    """One conversation; each prompt is a prefix of the next."""

    arrival_s: float
    system: Tokens
    turns: tuple[Turn, ...]

    def prompt(self, answers: list[list[int]]) -> list[int]:
        """The prompt after ``answers``: history, answers and the next question."""
        said = list(self.system)
        for turn, answer in zip(self.turns, answers, strict=False):
            said += [*turn.question, *answer]
        return said + list(self.turns[len(answers)].question)


def read_text(model: Path) -> Tokens:
    """Held-out text that lies beside a trained model; random tokens for one without."""
    path = model / "prompts.json"
    if path.exists():
        return tuple(token for text in json.loads(path.read_text("utf-8")) for token in text)
    numbers = random.Random("text")
    return tuple(numbers.randrange(10, 30_000) for _ in range(1 << 16))


def draw_talks(shape: Shape, rate: float, seed: int, text: Tokens) -> tuple[Talk, ...]:
    """Conversations that arrive by a Poisson process of ``rate`` a second.

    Tokens are stretches of ``text``, which goes round.
    """
    gaps, words, lengths = (random.Random(f"{seed} {name}") for name in ("gaps", "words", "sizes"))

    def stretch(count: int) -> Tokens:
        start = words.randrange(len(text))
        return tuple(text[(start + i) % len(text)] for i in range(count))

    def near(mean: int) -> int:
        return lengths.randint(max(2, mean // 2), max(2, mean + mean // 2))

    systems = [stretch(shape.system_tokens) for _ in range(shape.groups)]
    talks, arrival = [], 0.0
    for _ in range(shape.talks):
        arrival += gaps.expovariate(1.0)
        turns = tuple(
            Turn(
                question=stretch(near(shape.question_tokens)),
                answer_tokens=near(shape.answer_tokens),
                think_s=shape.think_s * lengths.expovariate(1.0) if at else 0.0,
            )
            for at in range(near(shape.turns))
        )
        talks.append(Talk(arrival / rate, words.choice(systems), turns))
    return tuple(talks)
