"""What can be done with a run from the command line: one file per command."""
