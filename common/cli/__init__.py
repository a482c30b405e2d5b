"""The command line, shared by both runtimes."""
