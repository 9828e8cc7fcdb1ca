"""The reward of the example: 1 when the last number of the answer is the right one, else 0."""

import re

from relax_data.types import Sample

NUMBER = re.compile(r"\d+(?:\.\d+)?")


def score(sample: Sample) -> float:
    """1.0 or 0.0; a number with a fraction is never right."""
    numbers = NUMBER.findall(sample.response)
    return float(bool(numbers) and numbers[-1] == sample.prompt.label)
