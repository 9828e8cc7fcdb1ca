"""One picture of a row, decoded."""

import contextlib
import io
from typing import Any

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
