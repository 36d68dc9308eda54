"""Adapters for what people already have: prompt files, text environments, environment servers (docs/adapters.md)."""
