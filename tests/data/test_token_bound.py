"""A prompt that is far too long is dropped without its tokens being counted."""

import random
from typing import Any

import pytest
from char_tokenizer import char_tokenizer
from relax_data.prompts.template import PromptBuilder, SourcedRow
from relax_data.prompts.token_bound import characters_a_token, fewest_tokens
from relax_data.settings import DataSettings
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = [
    "the cat sat on the mat " * 40,
    "    " * 300,
    "2 + 2 = 4\n" * 50,
    "e\u0301o\u0308 \U0001f600 \ufb01" * 60,
    "a" * 999,
]


def byte_level(normalizer: Any = None, strip: bool = False) -> Any:
    """A BPE as that of Qwen, trained on a few words."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(r"\p{N}|\s+|\p{L}+|[^\s\p{L}\p{N}]+"), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    core.add_special_tokens([AddedToken("<|im_start|>", lstrip=strip)])
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize("tokenizer", [char_tokenizer(), byte_level(), byte_level(normalizers.NFC())])
def test_no_text_has_fewer_tokens_than_the_bound(tokenizer: Any) -> None:
    bound = characters_a_token(tokenizer)
    assert bound is not None
    rng = random.Random(0)
    letters = "".join(TEXTS) + "<|im_start|>\u0301\u1100\u1161"
    for text in [*TEXTS, "<|im_start|>" * 50, *("".join(rng.choices(letters, k=500)) for _ in range(100))]:
        assert 1 <= fewest_tokens(text, bound) <= len(tokenizer(text)["input_ids"])


def of_words(**changes: Any) -> Any:
    core = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    core.pre_tokenizer = changes.get("pre_tokenizer", pre_tokenizers.WhitespaceSplit())
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize(
    "tokenizer",
    [
        of_words(),  # the unknown token stands for a word of any length
        of_words(pre_tokenizer=pre_tokenizers.Split(Regex(r"[\s\S]"), "removed")),
        byte_level(normalizers.Strip()),
        byte_level(strip=True),
        object(),
    ],
)
def test_where_nothing_can_be_told_nothing_is(tokenizer: Any) -> None:
    assert characters_a_token(tokenizer) is None


class Counting:
    """A tokenizer that counts the characters that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: list[str], **options: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._tokenizer(texts, **options)


@pytest.mark.parametrize("made", [char_tokenizer, byte_level])
def test_a_prompt_of_megabytes_is_dropped_untokenised(made: Any) -> None:
    tokenizer = Counting(made())
    builder = PromptBuilder(DataSettings(prompt_data=("x",), rollout_max_prompt_len=1000), tokenizer)
    rows = [SourcedRow("x:1", {"input": "1+1= " * 2_000_000}), SourcedRow("x:2", {"input": "1+1="})]
    long, short = builder.build(rows)
    assert long is None
    assert short is not None
    assert tokenizer.characters == 4
    (line,) = builder.drops.lines()
    assert line.startswith("1 rows dropped: longer than --rollout-max-prompt-len 1000 (x:1 has more than ")
