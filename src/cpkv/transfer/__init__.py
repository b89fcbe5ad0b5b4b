"""Moving pages from the rank that owns them to a decode worker: the back ends that write bytes, and who drives them."""
