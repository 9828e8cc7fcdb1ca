"""Options of the prompt data. Imports neither torch nor transformers."""

import dataclasses
from typing import Any, ClassVar

from relax_data.errors import DataError
from relax_data.options import LARGEST_COUNT, Settings, flag, option
from relax_data.readers.files import resolve_files

_NOT_OF_TEMPLATE = {
    *("conversation", "messages", "tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
}
"""Arguments of ``apply_chat_template`` that are not handed to the template."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """Places that prompts come from, and how a row becomes a prompt."""

    TITLE: ClassVar[str] = "Prompt data"

    prompt_data: tuple[str, ...] = option(
        (),
        "Prompts: .jsonl (also .gz, .zst) and .parquet files, folders, globs, several of them, slices such as "
        "'train.jsonl@[0:1000]' and Hugging Face datasets 'hf://OWNER/NAME'. Required.",
        metavar="PATH",
    )
    input_key: str = option("input", "Key of the prompt in a row: a string, or a list of chat messages.")
    label_key: str | None = option(None, "Key of the ground truth that the reward compares with.")
    metadata_key: str = option("metadata", "Key of an object that is handed to the reward as it is; rows may lack it.")
    tool_key: str | None = option(None, "Key of the tool descriptions for the chat template; rows may lack it.")
    multimodal_keys: dict[str, Any] | None = option(  # noqa: RUF009 (option makes a field)
        None,
        'Keys of other modalities as a JSON object, modality to key: \'{"image": "images"}\'. '
        "The marks <image>, <video>, <audio> in a text prompt say where the items stand.",
        metavar="JSON",
    )
    apply_chat_template: bool = option(False, "Render the prompt with the tokenizer's chat template.")
    apply_chat_template_kwargs: dict[str, Any] | None = option(  # noqa: RUF009
        None,
        "Further arguments of the chat template as a JSON object: '{\"enable_thinking\": false}'.",
        metavar="JSON",
    )
    system_prompt: str | None = option(None, "System message put before messages that have none of their own.")
    rollout_shuffle: bool = option(False, "Shuffle the prompts, in another order every epoch.")
    rollout_seed: int = option(  # an engine adds its number and seeds numpy, which takes 32 bits
        42, "Seed of the shuffle and of sampling.", ge=0, le=2**31 - 1
    )
    rollout_max_prompt_len: int | None = option(
        None,
        "Longest prompt in tokens; longer ones are dropped and counted. Default: no limit.",
        ge=1,
        le=LARGEST_COUNT,
    )
    skip_bad_rows: bool = option(False, "Count and report unusable rows instead of stopping at the first one.")
    use_streaming_dataset: bool = option(False, "Read prompts as they are needed, in memory that does not grow.")
    streaming_buffer_size: int = option(
        10000,
        "Rows of the streaming shuffle buffer; without --rollout-shuffle, rows read at a time.",
        ge=1,
        le=LARGEST_COUNT,
    )
    mm_processor_pool_size: int = option(
        0,
        "Processes of the multimodal processor, each loading it once; 0 is a pool of threads.",
        ge=0,
        le=LARGEST_COUNT,
    )
    num_data_storage_units: int = option(
        1,
        "Storage units of TransferQueue, which hold the rows of --fully-async; each is a process and a Ray CPU.",
        ge=1,
        le=LARGEST_COUNT,
    )

    def _problems(self, given: frozenset[str]) -> list[str]:
        found = []
        if "" in self.prompt_data:
            found.append("--prompt-data holds an empty path: is a shell variable in it not set?")
        elif self.prompt_data:
            try:
                resolve_files(self.prompt_data)
            except DataError as error:
                found.append(f"--prompt-data: {error}")
        elif not {"load_debug_rollout_data"} & given:
            found.append("--prompt-data is required: name a .jsonl or .parquet file, a folder or hf://OWNER/NAME")
        if not self.apply_chat_template:
            for name in ("apply_chat_template_kwargs", "system_prompt", "tool_key"):
                if getattr(self, name) is not None:
                    found.append(
                        f"{flag(name)} has no effect without --apply-chat-template: add it or drop {flag(name)}"
                    )
        for name in sorted(_NOT_OF_TEMPLATE & set(self.apply_chat_template_kwargs or {})):
            found.append(
                f"--apply-chat-template-kwargs: {name!r} is no argument of the template, it says how the tokenizer is "
                "called, which is fixed here (text first, tokens with --rollout-max-prompt-len after): remove it"
            )
        if "streaming_buffer_size" in given and not self.use_streaming_dataset:
            found.append(
                "--streaming-buffer-size has no effect without --use-streaming-dataset: add it or drop the size"
            )
        if self.mm_processor_pool_size > 0 and not self.multimodal_keys:
            found.append(
                "--mm-processor-pool-size has no effect without --multimodal-keys: "
                'name the modalities (\'{"image": "images"}\') or drop the size'
            )
        return found + self._multimodal_problems()

    def _multimodal_problems(self) -> list[str]:
        found = []
        for modality, key in (self.multimodal_keys or {}).items():
            if modality not in ("image", "video", "audio"):
                found.append(f"--multimodal-keys: unknown modality {modality!r}: use image, video or audio")
            if not isinstance(key, str) or not key:
                found.append(f"--multimodal-keys: {modality} must name the key of a row, not {key!r}")
        return found


SETTINGS: tuple[type, ...] = (DataSettings,)
