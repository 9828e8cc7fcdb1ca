"""A name that users import; the code is in :mod:`relax_data.prompts.source`."""

from relax_data.prompts.source import MemoryPromptSource, PromptSource, open_prompts

__all__ = ["MemoryPromptSource", "PromptSource", "open_prompts"]
