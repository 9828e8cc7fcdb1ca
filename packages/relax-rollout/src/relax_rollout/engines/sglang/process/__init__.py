"""The processes of one SGLang server: who ends them all, and what runs in the server itself.

Doors: the script :mod:`relax_rollout.engines.sglang.process.supervisor`, and
``python -m relax_rollout.engines.sglang.process.launch``.
"""

from pathlib import Path

SUPERVISOR = Path(__file__).with_name("supervisor.py")
"""Started by its path: it loads nothing but the standard library."""
