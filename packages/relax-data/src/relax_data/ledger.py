"""A name that users import; the code is in :mod:`relax_data.prompts.ledger`."""

from relax_data.prompts.ledger import LedgerError, PromptLedger, PromptState

__all__ = ["LedgerError", "PromptLedger", "PromptState"]
