"""Profilers for SGLang servers and torch training loops, and a report that says what to change."""
