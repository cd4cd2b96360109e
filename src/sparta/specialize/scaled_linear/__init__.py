"""The operation ``scaled_linear``: linear layers whose weight is stored in 8 or 4 bits with scales."""
