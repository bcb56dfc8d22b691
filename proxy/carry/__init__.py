"""What becomes of a request on its way to an instance, and of the answer on its way back."""
