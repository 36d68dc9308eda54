"""vLLM as an engine. ``engine.py``: in the actor's process; ``worker.py``: in the processes that hold the model."""
