"""Snapshots: state of a store as one streamable file, and back.

A snapshot is a tar of a manifest, one member a block (parents first), and ``SHA256SUMS`` of all of
them last. The same content gives the same bytes.
"""
