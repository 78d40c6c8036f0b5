"""Noticing an allocation and asking for room. Knows nothing of who will leave."""
