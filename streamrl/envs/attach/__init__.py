"""Playing leases of a run in a process outside of it (docs/attach.md)."""
