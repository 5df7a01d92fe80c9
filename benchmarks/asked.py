"""A worker process of a benchmark: works in one thread, and in another answers what its parent asks.

A line on standard input asks for something, a line of JSON on standard output answers. `end`, and the end of standard
input, end the work.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from abc import ABC, abstractmethod


class Asked(ABC):
    """`run` works until `ended` is set."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    @abstractmethod
    def run(self) -> None:
        """Works until told to end, then tells the outcome."""

    @abstractmethod
    def answer(self, word: str, rest: str) -> dict[str, object]:
        """The answer to a line, of its first word and what follows."""

    def serve(self) -> None:
        """Works in this thread and answers in another."""
        threading.Thread(target=self._listen, name="answers", daemon=True).start()
        self.run()

    def tell(self, **values: object) -> None:
        """Writes one answer; ends if nobody is there to read it."""
        try:
            print(json.dumps(values), flush=True)
        except BrokenPipeError:
            self.ended.set()
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - or the interpreter tries once more when it ends

    def _listen(self) -> None:
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "end":
                break
            self.tell(**self.answer(word, rest))
        self.ended.set()
