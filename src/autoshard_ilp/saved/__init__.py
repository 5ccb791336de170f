"""Plans as files, and a plan read from a file (or made for another instance) joined with its step again."""
