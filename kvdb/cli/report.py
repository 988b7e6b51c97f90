"""``kvdb report``: one HTML page about the store."""
