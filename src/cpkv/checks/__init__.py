"""What `cpkv check` looks at on an operator's machine: limits, memory, sockets, ports, and every back end for real."""
