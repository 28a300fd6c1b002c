"""What the derivation notebooks show and play with."""
