"""Programs without memory rows, as nets of factors: exact presolve, message passing, exact descent."""
