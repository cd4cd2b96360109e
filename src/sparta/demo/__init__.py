"""The demonstration: the whole job on a real model, as ``sparta demo`` runs it."""
