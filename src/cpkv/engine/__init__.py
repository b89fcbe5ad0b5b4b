"""Running the pieces: ranks of a prefill group, the decode worker, and the run that joins them."""
