"""The best plan within a limit of cost: elimination over sparse tables under several relaxations, then fronts."""
