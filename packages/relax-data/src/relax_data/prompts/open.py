"""Opens the prompts of a run: in memory, or streaming."""

from collections.abc import Collection, Sequence
from typing import Any

from relax_data.multimodal.processor import ProcessorPool
from relax_data.prompts.source import MemoryPromptSource, PromptSource
from relax_data.prompts.streaming import StreamingPromptSource
from relax_data.prompts.template import PromptBuilder
from relax_data.readers.files import resolve_files
from relax_data.settings import DataSettings


def open_prompts(
    settings: DataSettings,
    tokenizer: Any,
    *,
    num_epoch: int | None = None,
    paths: str | Sequence[str] | None = None,
    processor: ProcessorPool | None = None,
    media_tokens: Collection[int] = (),
) -> PromptSource:
    """Opens the prompts that the settings name.

    Args:
        settings: the data options.
        tokenizer: a transformers tokenizer.
        num_epoch: how often the data is gone through; None is without end.
        paths: read these instead of ``settings.prompt_data`` (evaluation).
        processor: of rows with pictures.
        media_tokens: that stand for pictures and videos, of a model that reads pictures.

    Raises:
        DataError: a file is missing or empty, a row is unusable, or no prompt is left after the filter. Without
            ``use_streaming_dataset`` all rows are read and checked here, before anything starts.
    """
    files = resolve_files(settings.prompt_data if paths is None else paths)
    builder = PromptBuilder(settings, tokenizer, processor, media_tokens)
    if settings.use_streaming_dataset:
        return StreamingPromptSource(files, builder, settings, num_epoch=num_epoch)
    return MemoryPromptSource(files, builder, settings, num_epoch=num_epoch)
