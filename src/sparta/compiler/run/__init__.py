"""What runs a compiled model; it imports nothing of what searches (``compiler.choose``)."""
