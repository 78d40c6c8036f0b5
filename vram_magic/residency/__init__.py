"""Blocks of weights, what backs them, proof that they are clean, and the moves. Knows no tiers and no notebook."""
