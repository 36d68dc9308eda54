"""streamrl: asynchronous reinforcement learning for language models, as a ring of long-lived actors."""

__version__ = "0.1.0"
