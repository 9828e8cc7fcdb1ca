"""Pictures of a row: decoded for the processor, and as the files that an engine gets."""

import base64
import contextlib
import errno
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
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
_DIGEST_BYTES = 16
_LONG, _BEGIN = 200, 16
"""Characters of a path, and bytes of a file that is no picture, which a message shows."""


def read_image(item: Any, where: str) -> tuple[Any, bytes]:
    """Reads one picture.

    Args:
        item: path, encoded bytes, or ``{"bytes": ..., "path": ...}`` as parquet files hold them.
        where: row, key and number of the picture, for errors.

    Returns:
        A ``PIL.Image.Image`` in RGB, turned as a viewer shows it, and a digest of its file.

    Raises:
        DataError: it cannot be read; begins with ``where`` and says why.
    """
    try:
        content = _content(item)
        return _decoded(content), hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
    except Exception as error:
        # Pillow raises what its decoders raise: SyntaxError, struct.error, DecompressionBombError, MemoryError.
        raise DataError(f"{where} ({_shown(item)}) cannot be read: {_cause(item, error)}") from error


def digest_of(digests: Sequence[bytes]) -> np.ndarray:
    """One digest, uint8 ``[16]``, of the digests of a prompt's pictures."""
    whole = hashlib.blake2b(b"".join(digests), digest_size=_DIGEST_BYTES)
    return np.frombuffer(whole.digest(), dtype=np.uint8)


def _content(item: Any) -> bytes:
    content, path = item, item
    if isinstance(item, dict):
        content, path = item.get("bytes"), item.get("path")
    if isinstance(content, bytes):
        return content
    if not isinstance(path, str) or (isinstance(item, dict) and content is not None):
        raise ValueError('it is no path, no bytes, and no object with one of them as "path" or "bytes"')
    return Path(path).read_bytes()


def _decoded(content: bytes) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        image.load()
        if image.mode in ("I", "F"):
            raise ValueError(
                "its pixels are numbers of 32 bits, whose range nobody knows: save it with 8 bits a channel"
            )
        orientation = 1
        with contextlib.suppress(Exception):  # damaged EXIF data: the pixels are whole, and viewers show them
            orientation = image.getexif().get(_ORIENTATION, 1)
        turn = _TURNS.get(orientation)
        turned: Any = image if turn is None else image.transpose(Image.Transpose[turn])
        if image.mode.startswith("I;16"):  # Pillow would cut off whatever is above 255, so that nearly all is white
            turned = Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8))
        return turned.convert("RGB")


def _shown(item: Any) -> str:
    """Names a picture in a few words, whatever stands in its place."""
    if isinstance(item, dict) and isinstance(item.get("bytes"), bytes):
        item = item["bytes"]
    if isinstance(item, bytes):
        return f"{len(item)} bytes"
    text = item if isinstance(item, str) else repr(item)
    return text if len(text) <= _LONG else f"{text[:_LONG]}... of {len(text)} characters"


def _cause(item: Any, error: Exception) -> str:
    """Why it cannot be read, in words of the row instead of the library's."""
    from PIL import UnidentifiedImageError

    path = item.get("path") if isinstance(item, dict) else item
    if isinstance(error, UnidentifiedImageError):
        begin = _content(item)[:_BEGIN]
        return (
            f"no picture that Pillow can open, or a damaged one: it begins with {begin!r}" if begin else "it is empty"
        )
    if not isinstance(path, str) or not isinstance(error, OSError) or error.errno is None:
        return str(error) or type(error).__name__
    if path.startswith("data:") or error.errno == errno.ENAMETOOLONG:
        return "a text is taken for a path: give a path, or the bytes themselves, which parquet can hold"
    if "://" in path:
        return "nothing is fetched from the web: download it and give its path"
    below = "" if Path(path).is_absolute() else f" below {Path.cwd()}"
    return f"{error.strerror}{below}"


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
