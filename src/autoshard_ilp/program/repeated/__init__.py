"""Programs that repeat themselves, as steps do whose layers all decide for themselves: a piece is solved for all."""
