"""How lengths are cut over ranks."""
