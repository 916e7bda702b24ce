"""Deliberate faults, each put into a copy of the source to see that its test fails.

``make faults`` runs all of them; ``tests/unit/test_faults.py`` keeps the table from rotting, and
``docs/robustness.md`` shows it.
"""
