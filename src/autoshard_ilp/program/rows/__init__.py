"""Programs under memory rows: prices on bytes, the bound and the plans that they lead to, and closing the gap."""
