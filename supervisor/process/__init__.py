"""One operating system process: spawn, output, exit cause."""
