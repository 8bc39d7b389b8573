"""Records to token ids."""
