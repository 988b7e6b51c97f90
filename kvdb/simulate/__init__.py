"""What would stay: block traces replayed through kvdb's own retention, and through others."""
