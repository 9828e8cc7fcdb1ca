"""Prompts in the order of an epoch: read, rendered, shuffled, handed out once, and booked.

Door: :func:`relax_data.prompts.open.open_prompts`; :class:`relax_data.prompts.ledger.PromptLedger` keeps the books.
"""
