"""vLLM as an engine. ``engine.py``: in the actor's process; ``server_engine.py``: as a server that runs already;
``worker.py``: in the processes that hold the model."""
