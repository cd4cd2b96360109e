"""The training loop as a recipe sees it: the optimizer's steps, the clock, the scaler, logs and the state file.

Nothing here knows what a modifier does; the manager joins the two.
"""
