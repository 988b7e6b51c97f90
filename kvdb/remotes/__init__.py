"""Remotes: places on a network where machines share blocks."""
