"""The parity gate (C7): engines and trainer give the same log-probs for the same tokens and weights, or nothing trains.

Pure but for ``rehearsal.py``, which drives one engine; nothing here imports torch. docs/parity.md explains the numbers.
"""
