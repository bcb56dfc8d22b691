"""What the proxy tells of itself: health, models, slots, metrics."""
