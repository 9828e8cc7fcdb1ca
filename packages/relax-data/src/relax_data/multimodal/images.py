"""Pictures of a row: decoded for the processor, and as the files that an engine gets."""

import base64
import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relax_data.errors import DataError

_ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held."""
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""How pixels are turned for each value of it (EXIF 2.32, section 4.6.4), in Pillow's names."""


def read_image(item: Any, where: str) -> Any:
    """Reads one picture.

    Args:
        item: path, encoded bytes, or ``{"bytes": ..., "path": ...}`` as parquet files hold them.
        where: sample and image, for errors.

    Returns:
        A ``PIL.Image.Image`` in RGB, turned as a viewer shows it.

    Raises:
        DataError: it cannot be read; names sample and image.
    """
    from PIL import Image

    try:
        if isinstance(item, dict):
            item = item["bytes"] if item.get("bytes") is not None else item["path"]
        with Image.open(io.BytesIO(item) if isinstance(item, bytes) else item) as image:
            image.load()
            orientation = 1
            with contextlib.suppress(Exception):  # damaged EXIF data: the pixels are whole, and viewers show them
                orientation = image.getexif().get(_ORIENTATION, 1)
            turn = _TURNS.get(orientation)
            return (image if turn is None else image.transpose(Image.Transpose[turn])).convert("RGB")
    except Exception as error:
        # Pillow raises what its decoders raise: SyntaxError, struct.error, DecompressionBombError, MemoryError.
        shown = f"{len(item)} bytes" if isinstance(item, bytes) else item
        what = str(error) or type(error).__name__
        raise DataError(f"{where} ({shown}) cannot be read: {what}") from error


def png_features(images: Sequence[Any]) -> dict[str, np.ndarray]:
    """The pictures as PNG files, in the form in which processes hand arrays on.

    An engine decodes them itself. It gets the pixels that the processor here got: turned already, and without losses,
    since two decoders of JPEG need not agree.

    Args:
        images: of ``PIL.Image.Image``.

    Returns:
        ``picture_png`` uint8 ``[bytes]``, one file after another, and ``picture_sizes`` int64 ``[pictures]``.
    """
    files = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=1)
        files.append(buffer.getvalue())
    return {
        "picture_png": np.frombuffer(b"".join(files), dtype=np.uint8),
        "picture_sizes": np.array([len(file) for file in files], dtype=np.int64),
    }


def picture_uris(features: Mapping[str, np.ndarray]) -> list[str]:
    """The pictures of :func:`png_features` as ``data:`` addresses; none without them."""
    if "picture_png" not in features:
        return []
    ends = features["picture_sizes"].cumsum()
    files = np.split(features["picture_png"], ends[:-1])
    return ["data:image/png;base64," + base64.b64encode(file.tobytes()).decode("ascii") for file in files]
