"""From the command line, the configuration file and the model file to a checked `RunConfig`; imports no torch."""
