"""Canaries: a model's replica on another engine, promoted or withdrawn by what it does."""
