"""A name that users import; the code is in :mod:`relax_data.prompts.streaming`."""

from relax_data.prompts.streaming import StreamedRow, StreamingDataset, StreamingPromptSource

__all__ = ["StreamedRow", "StreamingDataset", "StreamingPromptSource"]
