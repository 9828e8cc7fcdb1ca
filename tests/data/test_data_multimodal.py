"""The processor pool: a real vision processor, real JPEG files, both kinds of workers."""

import concurrent.futures
import gc
import importlib
import io
import json
import os
import struct
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from relax_data.errors import DataError
from relax_data.multimodal.processor import (
    Features,
    ProcessorCrashed,
    ProcessorPool,
    _Processes,
    _Threads,
    load_processor,
    run_processor,
)
from relax_data.types import Prompt


@pytest.fixture(scope="module")
def processor_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A CLIP processor, built offline: image processor, and a tokenizer of characters."""
    folder = tmp_path_factory.mktemp("clip")
    from transformers import CLIPImageProcessor, CLIPProcessor, CLIPTokenizer

    vocabulary = {c: i for i, c in enumerate([*"abcdefghijklmnopqrstuvwxyz", "<|startoftext|>", "<|endoftext|>"])}
    vocabulary |= {f"{c}</w>": len(vocabulary) + i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    size = {"shortest_edge": 56}
    images = CLIPImageProcessor(size=size, crop_size={"height": 56, "width": 56})
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    """Ten prompts, each with a JPEG file or its bytes, of different sizes."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    made = []
    for i in range(10):
        path = folder / f"{i}.jpg"
        Image.fromarray(rng.integers(0, 255, (80 + 7 * i, 120 - 3 * i, 3), dtype=np.uint8)).save(path)
        item = [str(path), path.read_bytes(), {"bytes": path.read_bytes(), "path": None}][i % 3]
        made.append(Prompt(i, 0, f"f.jsonl:{i + 1}", "a dog", [1], multimodal={"image": [item]}))
    return made


@pytest.mark.slow
def test_threads_and_processes_give_the_same_bits(processor_folder: str, prompts: list[Prompt]) -> None:
    with ProcessorPool(processor_folder, threads=2) as threads, ProcessorPool(processor_folder, size=2) as processes:
        for a, b in zip(threads.process(prompts), processes.process(prompts), strict=True):
            assert a.keys() == b.keys() >= {"pixel_values", "input_ids"}
            assert a["pixel_values"].shape == (1, 3, 56, 56)
            assert a["pixel_values"].dtype == np.float32
            for key in a:
                assert a[key].dtype == b[key].dtype
                assert np.array_equal(a[key], b[key])
        bad = {"image": [b"no image"]}
        for pool in (threads, processes):
            with pytest.raises(DataError, match=r"f.jsonl:9: image 1 \(8 bytes\) cannot be read"):
                pool.submit("f.jsonl:9", "a", bad).result(60)
            # The worker is as good as before.
            pool.submit("x", "a", prompts[0].multimodal).result(60)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with processors that take orders, importable in spawned processes too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("fake_processor")


def order(pool: ProcessorPool, what: str, name: str = "s") -> "concurrent.futures.Future[Features]":
    return pool.submit(name, "", {"audio": [what]})


@pytest.mark.slow
def test_a_result_keeps_no_shared_memory_and_no_open_file(fake: Any) -> None:
    def held() -> list[str]:
        """What of shared memory this process has mapped: anonymous results, and named segments of Python."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line for line in lines if "/memfd:features" in line or "/dev/shm/psm_" in line]

    gc.collect()  # what an earlier test left in a cycle of references goes now, not in between
    before = held()
    with ProcessorPool(fake.LoadFake(), size=1) as pool:
        order(pool, "ok").result(60)
        files = len(os.listdir("/proc/self/fd"))
        results = [order(pool, "ok").result(60) for _ in range(3)]
        assert (held(), len(os.listdir("/proc/self/fd"))) == (before, files)
        assert all(array.flags.writeable for result in results for array in result.values())


@pytest.mark.slow
def test_a_crashed_process_is_restarted_once_then_the_sample_is_named(fake: Any, tmp_path: Path) -> None:
    with ProcessorPool(fake.LoadFake(str(tmp_path / "died")), size=1) as pool:
        before = order(pool, "ok").result(60)["pid"][0]
        after = order(pool, "die once").result(60)
        assert after["pid"][0] != before
        assert after["empty"].shape == (0, 3)
        assert "".join(after["order"]) == "die once"
        with pytest.raises(ProcessorCrashed, match=r"f.jsonl:3: .*died on it twice: exit code 7; then exit code 7"):
            order(pool, "die", "f.jsonl:3").result(60)
        assert order(pool, "ok").result(60)["pid"][0] != before
        with pytest.raises(DataError, match=r"f.jsonl:4: the processor failed: ArithmeticError: no such thing"):
            order(pool, "raise", "f.jsonl:4").result(60)


@pytest.mark.slow
def test_a_process_that_hangs_is_ended_and_named(fake: Any) -> None:
    with ProcessorPool(fake.LoadFake(), size=1) as pool:
        assert isinstance(pool._workers, _Processes)
        patience, pool._workers._timeout = pool._workers._timeout, 1.0
        hanging = order(pool, "hang", "f.jsonl:5")
        with pytest.raises(ProcessorCrashed, match=r"f.jsonl:5: no answer .* within 1 s"):
            hanging.result(60)
        pool._workers._timeout = patience  # the processes that replace it need not be quick
        assert "".join(order(pool, "ok").result(60)["order"]) == "ok"


@pytest.mark.slow
def test_a_processor_that_cannot_be_loaded_is_an_error_at_the_start(fake: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the processor cannot be loaded: OSError: no weights"):
        ProcessorPool(fake.LoadFake(works=False), size=2)
    with pytest.raises(DataError, match="died while loading the processor: exit code 9"):
        ProcessorPool(fake.DieLoading(), size=1)
    with pytest.raises(DataError, match="holds no processor"):
        load_processor(str(tmp_path))


def test_submit_waits_while_too_many_are_pending(fake: Any) -> None:
    with ProcessorPool(fake.LoadFake(), threads=1, max_pending=2) as pool:
        release = threading.Event()
        assert isinstance(pool._workers, _Threads)
        pool._workers._processor = lambda **_: release.wait(60) and {"a": np.zeros(1)}
        first, second = order(pool, "x"), order(pool, "x")
        waiting = threading.Thread(target=lambda: order(pool, "x"))
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        release.set()
        waiting.join(60)
        assert not waiting.is_alive()
        assert first.result(60).keys() == second.result(60).keys() == {"a"}
    with pytest.raises(RuntimeError, match="closed"):
        order(pool, "x")


def test_results_keep_the_order_of_the_prompts(fake: Any) -> None:
    with ProcessorPool(fake.LoadFake(), threads=4) as pool:
        names = ["after the next" if i % 3 == 0 else f"n{i}" for i in range(12)]
        asked = (Prompt(i, 0, "f", "", [], multimodal={"audio": [n]}) for i, n in enumerate(names))
        assert ["".join(f["order"]) for f in pool.process(asked)] == names


@pytest.mark.parametrize("size", [0, 1])
def test_what_no_processor_should_do_is_an_error_that_names_the_sample(fake: Any, size: int) -> None:
    orders = ("objects", "records", "ragged", "list", "exit")
    with ProcessorPool(fake.LoadFake(), size=size) as pool:
        for order in orders:
            with pytest.raises(DataError, match=f"sample {order}: the processor"):
                pool.submit(f"sample {order}", "", {"audio": [order]}).result(60)
        assert pool.submit("after", "", {"audio": ["fine"]}).result(60)["order"].tolist() == list("fine")


def test_a_sample_that_waits_for_room_while_the_pool_closes_is_refused(fake: Any) -> None:
    """It would lie behind the end marks of the workers, and whoever waits for it would wait for ever."""
    pool = ProcessorPool(fake.LoadFake(), size=1, max_pending=1)
    pool._room.acquire()
    refused = []

    def submit() -> None:
        try:
            pool.submit("late", "", {"audio": ["fine"]})
        except RuntimeError as error:
            refused.append(str(error))

    waiting = threading.Thread(target=submit)
    waiting.start()
    pool.close()
    pool._room.release()
    waiting.join(60)
    assert refused == ["the processor pool is closed"]


class Pixels:
    """An image processor: the pixels as they are."""

    def __call__(self, images: list[Any], return_tensors: str) -> dict[str, np.ndarray]:
        return {"pixel_values": np.stack([np.asarray(i) for i in images])}


def photo(kind: str, orientation: int | None) -> bytes:
    """24 pixels wide, 16 high, every corner of another colour."""
    from PIL import Image

    pixels = np.zeros((16, 24, 3), np.uint8)
    pixels[:8, :12, 0] = pixels[8:, :12, 1] = pixels[:8, 12:, 2] = 255
    image = Image.fromarray(pixels)
    exif = image.getexif()
    if orientation is not None:
        exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, kind, exif=exif, **({"quality": 100} if kind == "JPEG" else {}))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("orientation", [None, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_a_photo_reaches_the_processor_as_viewers_show_it(kind: str, orientation: int | None) -> None:
    from PIL import Image, ImageOps

    content = photo(kind, orientation)
    found = run_processor(Pixels(), "x.jsonl:3", "", {"image": [content]})["pixel_values"][0]
    np.testing.assert_array_equal(found, np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content)))))


def test_a_photo_with_damaged_exif_data_is_read_as_it_lies() -> None:
    whole = photo("JPEG", 6)
    start = whole.index(b"Exif\0\0") + 6
    damaged = whole[:start] + b"\xff" * 20 + whole[start + 20 :]
    assert run_processor(Pixels(), "x.jsonl:3", "", {"image": [damaged]})["pixel_values"].shape == (1, 16, 24, 3)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bad_images() -> dict[str, Any]:
    from PIL import Image

    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 255, (300, 300, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    png = buffer.getvalue()
    second = png.index(b"IDAT", png.index(b"IDAT") + 4)
    size = struct.pack(">IIBBBBB", 20000, 20000, 1, 0, 0, 0, 0)
    start = png[:8] + chunk(b"IHDR", size)
    return {
        "cut": png[:1000],
        "too many pixels": start + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b""),
        "broken chunk": png[:second] + b"\x8d\x03\x98\xa6" + png[second + 4 :],
        "no image": b"text",
        "no pixels": png[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 0, 8, 2, 0, 0, 0)) + chunk(b"IEND", b""),
        "empty": b"",
        "text as bytes": {"bytes": "text"},
        "no bytes": {"bytes": None, "path": None},
        "no path": {},
        "of another kind": 7,
        "NUL in the path": "a\0b",
    }


@pytest.mark.parametrize("name", bad_images())
def test_a_bad_image_is_an_error_that_names_sample_and_image(name: str) -> None:
    with pytest.raises(DataError, match=r"^x.jsonl:7: image 2 \(.*\) cannot be read: ."):
        run_processor(Pixels(), "x.jsonl:7", "", {"image": [photo("PNG", None), bad_images()[name]]})


def test_sixteen_bits_a_pixel_become_eight() -> None:
    from PIL import Image

    grey = np.arange(0, 65536, 64, dtype=np.uint16).reshape(32, 32)
    buffer = io.BytesIO()
    Image.fromarray(grey).save(buffer, "PNG")
    found = run_processor(Pixels(), "x.jsonl:1", "", {"image": [buffer.getvalue()]})["pixel_values"][0]
    np.testing.assert_array_equal(found, np.repeat((grey >> 8)[..., None], 3, 2))
    buffer = io.BytesIO()
    Image.fromarray(grey.astype(np.float32)).save(buffer, "TIFF")
    with pytest.raises(DataError, match=r"pixels are numbers of 32 bits, .* save it with 8 bits a channel"):
        run_processor(Pixels(), "x.jsonl:1", "", {"image": [buffer.getvalue()]})


def test_a_processor_adds_no_second_begin_token(processor_folder: str) -> None:
    processor = load_processor(processor_folder)
    begin = processor.tokenizer.bos_token_id
    for text in ("a dog", "<|startoftext|>a dog"):
        ids = run_processor(processor, "x.jsonl:1", text, {"image": [photo("PNG", None)]})["input_ids"]
        assert ids[0].tolist().count(begin) == 1
