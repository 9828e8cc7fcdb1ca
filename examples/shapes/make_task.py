"""Build the example of pictures: prompts with a coloured shape each, the processor and the start model, from one seed.

    python examples/shapes/make_task.py [--out FOLDER]

Each prompt shows a picture and asks for the colour of the shape on it, one of four. The four are equally frequent, so
whoever does not look at the picture is right in a quarter of the cases. The start model, a Qwen2.5-VL of 0.4 million
parameters, is taught on a corpus in which 40 % of the answers are right: it has seen that pictures matter, and still
answers wrongly more often than not. Held-out pictures are not in the corpus.
"""

import argparse
import io
import json
import random
from pathlib import Path
from typing import Any

COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 50)}
SIDE = 56
QUESTION = "<image>colour?"
CHARACTERS = "abcdefghijklmnopqrstuvwxyz?:\n "
SPECIAL = ("<pad>", "<eos>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
TRAIN, HELDOUT, CORPUS, RIGHT = 512, 128, 1024, 0.4
STEPS, BATCH = 160, 32


def draw_picture(draw: random.Random, colour: str) -> bytes:
    """A PNG file: a rectangle or an ellipse of the colour, somewhere on a grey ground."""
    from PIL import Image, ImageDraw

    grey = draw.randrange(60, 200)
    image = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
    shade = tuple(min(255, max(0, part + draw.randrange(-20, 21))) for part in COLOURS[colour])
    width, height = draw.randrange(18, 36), draw.randrange(18, 36)
    left, top = draw.randrange(SIDE - width), draw.randrange(SIDE - height)
    pen = ImageDraw.Draw(image)
    shape = draw.choice([pen.rectangle, pen.ellipse])
    shape((left, top, left + width, top + height), fill=shade)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def make_rows(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Rows of a data file, each colour equally often."""
    names = [list(COLOURS)[i % len(COLOURS)] for i in range(count)]
    draw.shuffle(names)
    return [{"input": QUESTION, "images": [draw_picture(draw, name)], "label": name[0]} for name in names]


def save_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes the rows as a parquet file, which holds the pictures as bytes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def make_processor(folder: Path) -> Any:
    """Writes tokenizer (a token for each character) and image processor (a token for 28 x 28 pixels)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLProcessor, Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    vocab = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=list(SPECIAL[2:])
    )
    size = {"shortest_edge": 28 * 28, "longest_edge": SIDE * SIDE}
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(size=size), tokenizer, Qwen2VLVideoProcessor(size=size), chat_template=TEMPLATE
    )
    processor.save_pretrained(folder)
    return processor


def make_model(processor: Any) -> Any:
    """A ``Qwen2_5_VLForConditionalGeneration`` with random weights."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    ids = processor.tokenizer.convert_tokens_to_ids
    text = dict(
        vocab_size=64,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=ids("<eos>"),
        pad_token_id=ids("<pad>"),
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
    )
    vision = dict(
        depth=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        out_hidden_size=96,
        fullatt_block_indexes=[1],
    )
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # so small a model learns little from weights as small as a large one's
                parameter.normal_(0, 0.1)
    return model


def teach(model: Any, processor: Any, rows: list[dict[str, Any]], draw: random.Random) -> float:
    """Supervised steps on answers of which :data:`RIGHT` are right; returns the last loss."""
    import torch
    from PIL import Image

    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION[7:]}]}]
    prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = [Image.open(io.BytesIO(row["images"][0])) for row in rows]
    found = processor(text=[prompt] * len(rows), images=images, return_tensors="pt")
    patches = found["pixel_values"].view(len(rows), -1, found["pixel_values"].shape[-1])
    letters = [name[0] for name in COLOURS]
    answers = [
        row["label"] if draw.random() < RIGHT else draw.choice([x for x in letters if x != row["label"]])
        for row in rows
    ]
    ids = processor.tokenizer.convert_tokens_to_ids
    ends = torch.tensor([[ids(letter), ids("<eos>")] for letter in answers])
    tokens = torch.cat([found["input_ids"], ends], 1)
    kinds = torch.cat([found["mm_token_type_ids"], torch.zeros_like(ends)], 1)
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loss = torch.zeros(())
    for _ in range(STEPS):
        chosen = torch.tensor([draw.randrange(len(rows)) for _ in range(BATCH)])
        logits = model(
            input_ids=tokens[chosen],
            attention_mask=torch.ones_like(tokens[chosen]),
            mm_token_type_ids=kinds[chosen],
            pixel_values=patches[chosen].flatten(0, 1),
            image_grid_thw=found["image_grid_thw"][chosen],
        ).logits[:, -3:-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ends[chosen].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    return float(loss.detach())


def main() -> None:
    """Writes ``data/`` and ``model/``."""
    import torch

    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent)
    out = arguments.parse_args().out
    draw = random.Random(7)
    for name, count in (("train", TRAIN), ("heldout", HELDOUT)):
        save_rows(make_rows(draw, count), out / "data" / f"{name}.parquet")
    torch.manual_seed(7)
    torch.set_num_threads(1)  # more cost more than they give
    processor = make_processor(out / "model")
    model = make_model(processor)
    loss = teach(model, processor, make_rows(draw, CORPUS), draw)
    model.save_pretrained(out / "model")
    print(json.dumps({"parameters": model.num_parameters(), "loss": round(loss, 3), "folder": str(out)}))


if __name__ == "__main__":
    main()
