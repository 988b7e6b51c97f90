"""The HTTP adapter over the engine: dialects, access control, administration."""
