"""State of an engine's weights, as the engine tells it: a version, or why they are not whole.

SGLang keeps one text beside the weights and returns it with every response. While a push runs, and after one that
failed, that text is a marker instead of a number. So every client in every process sees that the engine holds a
mixture, also when the process that pushed is gone.
"""

import dataclasses
from typing import Literal

from relax_data.types import WeightVersion

State = Literal["whole", "pushing", "broken", "released"]


class WeightsIncomplete(RuntimeError):
    """The engine's weights are not one whole version; only a whole push makes it generate again."""


@dataclasses.dataclass(frozen=True)
class WeightStatus:
    """State of an engine's weights.

    Attributes:
        state: ``whole``; ``pushing`` while an update runs; ``broken`` after one that failed; ``released`` when the
            memory of the weights was given back.
        version: the version they have, or that the push was to bring.
    """

    state: State
    version: WeightVersion

    def __str__(self) -> str:
        return str(self.version) if self.state == "whole" else f"{self.state}:{self.version}"

    @classmethod
    def parse(cls, text: str) -> "WeightStatus":
        """Reads the text that SGLang returns; ``default`` are the start weights of a server that we did not start.

        Raises:
            ValueError: the text is none of ours.
        """
        if text == "default":
            return cls("whole", 0)
        state, _, number = text.rpartition(":")
        if state in ("", "pushing", "broken", "released") and number.isdigit():
            return cls(state or "whole", int(number))  # type: ignore[arg-type]
        raise ValueError(f"the engine calls its weights {text!r}, which is no version of ours")

    def require_whole(self, engine: str) -> WeightVersion:
        """The version, if the weights are whole.

        Raises:
            WeightsIncomplete: says why not, and what to do.
        """
        if (error := self.problem(engine)) is not None:
            raise error
        return self.version

    def problem(self, engine: str) -> WeightsIncomplete | None:
        """Why the engine does not generate, or None when its weights are whole."""
        if self.state == "whole":
            return None
        why = {
            "pushing": f"the push of version {self.version} has not finished",
            "broken": f"the push of version {self.version} failed midway, its weights are a mixture of two versions",
            "released": f"its weights (version {self.version}) were released from memory",
        }[self.state]
        return WeightsIncomplete(f"{engine} does not generate: {why}. Push a whole set of weights to it.")
