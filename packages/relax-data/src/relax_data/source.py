"""A name that users import; the code is in :mod:`relax_data.prompts.source`."""

from relax_data.prompts.open import open_prompts
from relax_data.prompts.source import MemoryPromptSource, PromptSource

__all__ = ["MemoryPromptSource", "PromptSource", "open_prompts"]
