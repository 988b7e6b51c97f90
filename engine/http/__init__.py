"""The HTTP adapter: API dialects over ``engine.Pool``. Nothing about caching is decided here."""
