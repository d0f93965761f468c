"""The command line of residuum. It only reads options, calls the library and prints results."""
