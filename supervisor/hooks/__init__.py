"""Commands of the user that run when something happens to a model, a node or the daemon."""
