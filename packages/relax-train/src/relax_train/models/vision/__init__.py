"""Pictures: the shape of a vision tower, places and positions of picture tokens, the tower before the decoder.

Doors: :class:`VisionShape` and :func:`lay_out_pictures`, which need no torch, and
:mod:`relax_train.models.vision.tower`, which does.
"""

from relax_train.models.vision.places import PictureRow, Pictures, lay_out_pictures
from relax_train.models.vision.shape import VisionShape, read_vision

__all__ = ["PictureRow", "Pictures", "VisionShape", "lay_out_pictures", "read_vision"]
