"""What all subjects share: turns, rules, processes and results."""
