"""What a schedule is: actions, topology, placement, and the one table of dependency rules."""
