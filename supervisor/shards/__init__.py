"""Models split over workers: the time of each shard, and how many layers each should have."""
