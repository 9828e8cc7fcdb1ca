"""Rows with pictures: their tokens, what the trainer and the engine get of them, bad ones, and their return."""

import base64
import dataclasses
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_data.errors import DataError
from relax_data.multimodal import ProcessorPool
from relax_data.multimodal.images import picture_uris
from relax_data.prompts.open import open_prompts
from relax_data.prompts.saved_groups import groups_from_state, groups_to_state
from relax_data.prompts.source import PromptSource
from relax_data.settings import DataSettings
from relax_data.types import Sample, SampleGroup, SampleStatus, StepManifest, TrainBatch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A processor, and pictures of 6, 2 and 4 tokens; the last is 56 wide and 28 high, and held upright."""
    from PIL import Image
    from tiny_vision import save_processor

    base = tmp_path_factory.mktemp("pictures")
    save_processor(base)
    rng = np.random.default_rng(3)
    for name, size in (("a.png", (56, 84)), ("b.png", (28, 56)), ("c.png", (56, 28))):
        image = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
        exif = image.getexif()
        if name == "c.png":
            exif[0x0112] = 6
        image.save(base / name, exif=exif)
    (base / "bad.png").write_bytes((base / "a.png").read_bytes()[:900])
    return base


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[ProcessorPool]:
    with ProcessorPool(str(folder)) as made:
        yield made


def opened(folder: Path, pool: ProcessorPool, rows: list[list[Any]], **options: Any) -> PromptSource:
    paths = [[str(folder / name) for name in names] for _, *names in rows]
    lines = [{"input": text, "images": images} for (text, *_), images in zip(rows, paths, strict=True)]
    return read_rows(folder, pool, lines, f"rows{abs(hash(str(rows)))}", **options)


def read_rows(folder: Path, pool: ProcessorPool, rows: list[Any], name: str, **options: Any) -> PromptSource:
    from transformers import AutoTokenizer

    data = folder / f"{name}.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    settings = DataSettings(
        prompt_data=(str(data),), apply_chat_template=True, multimodal_keys={"image": "images"}, **options
    )
    return open_prompts(settings, AutoTokenizer.from_pretrained(folder), processor=pool, num_epoch=1)


@pytest.mark.parametrize("streaming", [False, True])
def test_tokens_count_pieces_and_the_engine_gets_one_for_each_picture(
    folder: Path, pool: ProcessorPool, streaming: bool
) -> None:
    from PIL import Image
    from transformers import AutoProcessor

    rows = [["what is <image>?", "a.png"], ["<image> or <image>?", "b.png", "c.png"], ["what?"]]
    prompts = opened(folder, pool, rows, use_streaming_dataset=streaming).next(3)
    token = AutoProcessor.from_pretrained(folder).image_token_id
    assert [p.input_ids.count(token) for p in prompts] == [6, 4, 0]
    assert [list(p.features.get("engine_ids", p.input_ids)).count(token) for p in prompts] == [1, 2, 0]
    assert [len(p.features["image_grid_thw"]) for p in prompts[:2]] == [1, 2]
    assert prompts[1].features["image_grid_thw"].tolist() == [[1, 2, 4], [1, 2, 4]], "c.png is shown lying"
    assert prompts[2].features == {}
    assert prompts[0].features["media_tokens"].tolist() == [token]
    # What the engine decodes gives the very tensors that the trainer gets.
    files = [base64.b64decode(uri.partition(",")[2]) for uri in picture_uris(prompts[1].features)]
    again = AutoProcessor.from_pretrained(folder).image_processor(
        images=[Image.open(io.BytesIO(file)) for file in files], return_tensors="np"
    )
    np.testing.assert_array_equal(again["pixel_values"], prompts[1].features["pixel_values"])
    assert picture_uris(prompts[2].features) == []


def test_a_bad_picture_is_the_error_of_its_row(folder: Path, pool: ProcessorPool) -> None:
    rows = [["what is <image>?", "a.png"], ["what is <image>?", "bad.png"], ["<image>?", "b.png"]]
    with pytest.raises(DataError, match=r"jsonl:2: key 'images': image 1 \(.*bad.png\) cannot .*--skip-bad-rows"):
        opened(folder, pool, rows)
    source = opened(folder, pool, rows, skip_bad_rows=True)
    assert (len(source), source.drops.unusable) == (2, 1)
    assert [p.source[-1] for p in source.next(2)] == ["1", "3"]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ("gone.png", r"key 'images': image 1 \(gone.png\) cannot be read: No such file or directory below /"),
        ("https://x.y/a.png", "image 1 .* nothing is fetched from the web: download it and give its path"),
        ("data:image/png;base64," + 9999 * "A", r"image 1 \(data:\S+\.\.\. of 10021 characters\) .* taken for a path"),
        ([{"url": "a.png"}], r"image 1 \(\{'url': 'a.png'\}\) .* no path, no bytes, and no object"),
        (["a.png", 7], "key 'images': image 2 is a number; it must be a path, bytes, or an object"),
        ([None], "key 'images': image 1 is null; it must be"),
        ([], "key 'input': a <image> mark, and the row has no image under the key 'images'"),
        (
            ["a.png", "b.png"],
            "key 'input': the key 'images' has 2 items and the text 1 marks of them: write <image> once",
        ),
        (["flat.png"], "key 'images': the processor failed on pictures of 900 x 2 pixels: .* aspect ratio"),
    ],
)
def test_what_is_wrong_with_the_pictures_of_a_row_is_said(
    folder: Path, pool: ProcessorPool, images: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    Image.new("RGB", (900, 2)).save(folder / "flat.png")
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=rf"wrong.jsonl:2: .*{message}.* --skip-bad-rows"):
        read_rows(folder, pool, [{"input": "?"}, {"input": "<image>?", "images": images}], "wrong")


def test_a_mark_of_a_video_beside_a_picture_is_the_error_of_its_row(folder: Path, pool: ProcessorPool) -> None:
    rows = [["<image> or <|video_pad|>?", "a.png"], ["<image>?", "b.png"]]
    with pytest.raises(DataError, match=r"jsonl:1: the prompt has token \d+, which .* a video .*--skip-bad-rows"):
        opened(folder, pool, rows)
    assert len(opened(folder, pool, rows, skip_bad_rows=True)) == 1


def test_a_typed_mark_of_a_picture_without_one_is_the_error_of_its_row(folder: Path, pool: ProcessorPool) -> None:
    from tiny_vision import media_tokens
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = folder / "typed.jsonl"
    data.write_text(
        "\n".join(json.dumps({"input": text}) for text in ("what is <|image_pad|>?", "what?", "<|video_pad|>"))
    )
    settings = DataSettings(prompt_data=(str(data),), apply_chat_template=True, multimodal_keys={"image": "images"})
    media = media_tokens(tokenizer)
    with pytest.raises(DataError, match=rf"jsonl:1: the prompt has token {media[0]}, which .* a picture.*--skip-bad"):
        open_prompts(settings, tokenizer, processor=pool, media_tokens=media)
    skipping = dataclasses.replace(settings, skip_bad_rows=True)
    for streaming in (False, True):
        each = dataclasses.replace(skipping, use_streaming_dataset=streaming)
        source = open_prompts(each, tokenizer, num_epoch=1, processor=pool, media_tokens=media)
        assert [p.source[-1] for p in source.next(2)] == ["2"]
    assert len(open_prompts(settings, tokenizer, processor=pool)) == 3, "to a model of text it is a token like others"


def test_a_length_limit_counts_the_pieces(folder: Path, pool: ProcessorPool) -> None:
    rows = [["<image>?", "a.png"], ["<image>?", "b.png"]]
    short, long = sorted(len(p.input_ids) for p in opened(folder, pool, rows).next(2))
    assert (short, long) == (long - 4, long)
    assert len(opened(folder, pool, rows, rollout_max_prompt_len=long - 1)) == 1


def test_the_limit_of_memory_is_looked_at_every_few_rows(
    folder: Path, pool: ProcessorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [["<image>?", "b.png"]] * 40
    monkeypatch.setattr("relax_data.prompts.source._MOST_PICTURE_BYTES", 1)
    with pytest.raises(DataError, match=r"the first 16 prompts .*--use-streaming-dataset"):
        opened(folder, pool, rows)


def test_tensors_come_back_after_a_checkpoint_or_it_is_said_that_they_changed(
    folder: Path, pool: ProcessorPool
) -> None:
    source = opened(folder, pool, [["<image>?", "a.png"]])
    prompt = source.next(1)[0]
    saved = dataclasses.replace(prompt, features={})
    source.restore(saved)
    assert saved.features.keys() == prompt.features.keys()
    for name, array in prompt.features.items():
        np.testing.assert_array_equal(saved.features[name], array)
    other = dataclasses.replace(prompt, multimodal={"image": [str(folder / "b.png")]}, features={})
    with pytest.raises(DataError, match="put pictures and processor back"):
        source.restore(other)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_picture_that_changed_since_a_checkpoint_is_told(folder: Path, pool: ProcessorPool, streaming: bool) -> None:
    """Its size and the tokens stay, one pixel is another."""
    from PIL import Image

    for name in ("one.png", "two.png"):
        (folder / name).write_bytes((folder / "a.png").read_bytes())
    rows = [["<image>?", "one.png"], ["<image>?", "two.png"], ["?"]]
    source = opened(folder, pool, rows, use_streaming_dataset=streaming)
    open_group = SampleGroup.start(source.next(1)[0], 1)
    state, saved = json.loads(json.dumps(source.state_dict())), groups_to_state([open_group])

    def resume() -> None:
        again = opened(folder, pool, rows, use_streaming_dataset=streaming)
        again.load_state_dict(state)
        (group,) = groups_from_state(json.loads(json.dumps(saved[0])), saved[1])
        again.restore(group.prompt)
        assert group.prompt.features.keys() == open_group.prompt.features.keys()

    def change(name: str) -> None:
        with Image.open(folder / name) as image:
            image.load()
        image.putpixel((3, 5), (0, 1, 2))
        image.save(folder / name)

    resume()
    change("two.png")
    if streaming:
        resume()  # it is read when its row comes
    else:
        with pytest.raises(
            DataError, match=r"rows\S*.jsonl, rows 1 to 256: a picture of theirs is another than at the"
        ):
            resume()
        del state["pictures"]  # a checkpoint of before
        resume()
    change("one.png")
    with pytest.raises(DataError, match=r"jsonl:1: a picture is another than at the checkpoint: .* put it back"):
        resume()


def test_a_picture_that_is_gone_since_a_checkpoint_is_named(folder: Path, pool: ProcessorPool) -> None:
    """The row is left out with --skip-bad-rows, so that there is a prompt less: the message says which, and why."""
    for name in ("stays.png", "goes.png"):
        (folder / name).write_bytes((folder / "a.png").read_bytes())
    far = [["<image>?", "bad.png"], *([["?"]] * 255), ["<image>?", "stays.png"], ["?"], ["<image>?", "goes.png"]]
    source = opened(folder, pool, far, skip_bad_rows=True)
    state = json.loads(json.dumps(source.state_dict()))
    opened(folder, pool, far, skip_bad_rows=True).load_state_dict(state)
    (folder / "goes.png").unlink()
    with pytest.raises(DataError) as raised:
        opened(folder, pool, far, skip_bad_rows=True).load_state_dict(state)
    told = str(raised.value)
    assert told.startswith("the checkpoint has 258 prompts an epoch, now there are 257: put the pictures back, ")
    assert re.search(r"leaves out \S*rows\d+\.jsonl:259: .*goes\.png", told)
    assert "bad.png" not in told, "that row was left out then too"
    (folder / "goes.png").write_bytes((folder / "a.png").read_bytes())
    shorter = opened(folder, pool, far, skip_bad_rows=True, rollout_max_prompt_len=19)
    with pytest.raises(DataError, match="--rollout-max-prompt-len, --skip-bad-rows"):
        shorter.load_state_dict(state)


def test_the_pool_says_how_long_rows_waited_for_it(folder: Path, pool: ProcessorPool) -> None:
    pool.waited_s = 0.0
    opened(folder, pool, [["?"]])
    assert pool.waited_s == 0, "a row of text waits for nothing"
    opened(folder, pool, [["<image>?", "a.png"]])
    assert pool.waited_s > 0


def test_responses_to_a_prompt_share_its_tensors(folder: Path, pool: ProcessorPool) -> None:
    groups = [SampleGroup.start(p, 2) for p in opened(folder, pool, [["<image>?", "a.png"], ["?"]]).next(2)]
    for sample in (s for g in groups for s in g.samples):
        assert isinstance(sample, Sample)
        sample.append([5], [-1.0], 0)
        sample.status, sample.reward = SampleStatus.COMPLETED, 1.0
    batch = TrainBatch.from_groups(groups, 0)
    assert batch.pixel_values[0] is batch.pixel_values[1] is groups[0].prompt.features["pixel_values"]
    assert [grid.tolist() for grid in batch.image_grid_thw] == [[[1, 4, 6]]] * 2 + [[]] * 2
    assert batch.select([3, 0]).image_grid_thw[1].tolist() == [[1, 4, 6]]
    assert StepManifest.of(batch).prompt_lengths.tolist() == [len(g.prompt.input_ids) for g in groups for _ in "12"]
