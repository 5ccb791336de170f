"""autoshard_ilp."""
