"""Images of a prompt to tensors, in threads or processes.

Door: :class:`ProcessorPool`.
"""

from relax_data.multimodal.processor import ProcessorPool

__all__ = ["ProcessorPool"]
