"""SGLang as an engine: its server as a child process, or one that runs already, over HTTP (docs/engines.md)."""
