"""The transfer protocol between prefill and decode: messages and bookkeeping, without sockets."""
