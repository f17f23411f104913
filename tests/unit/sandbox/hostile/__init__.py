"""Programs that attack. A package, so that its modules share the servers of conftest.py."""
