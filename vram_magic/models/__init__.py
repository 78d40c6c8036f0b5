"""Managed models: what they are made of, how they are called, where they come from. Knows no eviction order."""
