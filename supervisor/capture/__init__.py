"""Requests of one model with their responses, for as long as somebody captures them."""
