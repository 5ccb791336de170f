"""What things cost on named hardware: roofline, links, collectives."""
