"""Prompts: from messages to text to token ids, and where each part of them ends. Free of MLX."""
