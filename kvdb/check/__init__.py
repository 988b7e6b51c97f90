"""verify, repair, rebuild: is what the store says true, and if not, what can be saved."""
