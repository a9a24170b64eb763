"""Commands that use a trained model, or what it has written.

Not here: commands that train and export a model (``flows.cli``).
"""
