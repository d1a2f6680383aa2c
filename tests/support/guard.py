"""How long a test waits before it says that something hangs."""

GUARD_S = 60
"""Never what is tested: a machine may be busy, and a step that takes a millisecond takes seconds there."""
